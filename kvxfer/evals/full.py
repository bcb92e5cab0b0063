"""``eval=full``: every kind of evaluation of one map, and what they come to together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.statistics import summarise
from kvxfer.report.verdict import WORDS, Verdict, accuracy_outcome, ancestry_sentence, nats_outcome, verdict

Json = Mapping[str, Any]

OUTCOMES = {"beats": "better", "none": "no benefit", "worse": "worse", "mixed": "mixed"}
"""What one evaluation comes to, against the source."""

ITEMS = ("items", "samples")
"""What evaluations call a list with an entry for every single item."""

ITEMS_HEADING = "Questions, or text that follows"


def kind_of(results: Json) -> str:
    """The kind of an evaluation, from its results.json."""
    return str(results.get("kind", "items"))


def heading(results: Json) -> str:
    """What a report calls an evaluation."""
    kind = kind_of(results)
    return ITEMS_HEADING if kind == "items" else KINDS[kind].heading


def said(results: Json) -> Verdict:
    """The verdict of one evaluation against the source."""
    if kind_of(results) == "items":
        return verdict(results["conditions"], results["tests"])
    return KINDS[kind_of(results)].verdict(results["data"])


def measured(name: str, results: Json, seconds: float) -> dict[str, Any]:
    """A part of the full report's data: a finished evaluation, all but the scores of single items."""
    own = said(results)
    return {
        "name": name,
        "status": "measured",
        "kind": kind_of(results),
        "heading": heading(results),
        "run_id": results["run_id"],
        "seconds": seconds,
        "verdict": {"kind": own.kind, "head": own.head, "sentence": own.sentence},
        "tasks": [_task(name, task, conditions) for task, conditions in _tasks(results).items()],
        "results": without_items(results),
    }


def missing(name: str, status: str, reason: str) -> dict[str, Any]:
    """A part that ``failed`` or was ``skipped``, and why."""
    return {"name": name, "status": status, "reason": reason}


def without_items(value: Any) -> Any:
    """The same without any list of single items' scores: its own run has them."""
    if isinstance(value, Mapping):
        return {k: without_items(v) for k, v in value.items() if not (k in ITEMS and isinstance(v, list))}
    return [without_items(item) for item in value] if isinstance(value, list) else value


def _tasks(results: Json) -> dict[str, Mapping[str, Any]]:
    """Conditions by task: of items the kinds of question, where there are several."""
    if kind_of(results) != "items":
        return KINDS[kind_of(results)].by_task(results["data"])
    if results["conditions"]["mapped"]["accuracy"] is None:
        return {}
    kinds = list(dict.fromkeys(str(item["kind"]) for item in results["items"]))
    found = {"all questions" if len(kinds) > 1 else kinds[0]: results["conditions"]}
    for kind in kinds if len(kinds) > 1 else []:
        found[kind] = summarise([item for item in results["items"] if str(item["kind"]) == kind])["conditions"]
    return found


def _task(part: str, task: str, conditions: Json) -> dict[str, Any]:
    """One row of the figure of tasks: shares of the ceiling's accuracy, None where that is 0."""
    mapped, ceiling = conditions["mapped"], conditions["ceiling"]["accuracy"]
    accuracies = {name: conditions[name]["accuracy"] for name in ("ceiling", "source", "mapped")}
    return {
        "part": part,
        "task": task,
        "n": mapped["n"],
        **accuracies,
        "retention": mapped["retention"],
        "retention_ci": mapped["retention_ci"],
        "source_retention": accuracies["source"] / ceiling if ceiling else None,
    }


@dataclass(frozen=True)
class Overall:
    """What all parts come to.

    Attributes:
        kind: as a Verdict's; ``word`` says it in a word or two.
        sentence: the word, then the deciding part's numbers.
        decided_by: that part's name; None where nothing was compared with the source.
        against: names of measured parts that say less than ``kind`` does; ``in_favour``: those that say more.
    """

    kind: str
    word: str
    sentence: str
    decided_by: str | None
    against: list[str]
    in_favour: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For results.json."""
        return dict(vars(self))


NOT_COMPARED = "Not compared"
_ORDER = {"worse": 0, "mixed": 1, "none": 1, "beats": 2}


def overall(parts: Sequence[Json]) -> Overall:
    """The first part with items decides, without one the first that is not timed; the others agree or contradict.

    What is timed is compared with the target's own prefill, so it never says whether a map beats the source.

    Raises:
        KvxferError: no part was measured.
    """
    known = [part for part in parts if part["status"] == "measured"]
    if not known:
        reasons = "; ".join(f"{part['name']}: {part['reason']}" for part in parts)
        raise KvxferError(f"eval.parts: none could be measured ({reasons})")
    compared = [part for part in known if part["kind"] == "items" or not KINDS[part["kind"]].timed]
    if not compared:
        names = ", ".join(part["name"] for part in known)
        said = f"{NOT_COMPARED}: nothing was set against the source, only times were measured ({names})."
        return Overall("none", NOT_COMPARED, said, None, *_others(known, "none"))
    first = next((part for part in compared if part["kind"] == "items"), compared[0])
    kind, sentence = first["verdict"]["kind"], _worded(first["verdict"]["kind"], first["verdict"]["sentence"])
    if first["kind"] == "items" and kind == "beats" and not _beats_ancestor(first["results"]):
        own = sentence.removeprefix(WORDS[kind])[2:]
        kind = "none"
        sentence = (
            f"{WORDS[kind]}: the source was cut out of the target, and a copy of each layer's ancestor is not beaten. "
            f"{own[:1].upper()}{own[1:]}"
        )
    others = [part for part in known if part is not first]
    return Overall(kind, WORDS[kind], sentence, first["name"], *_others(others, kind))


def _others(parts: Sequence[Json], kind: str) -> tuple[list[str], list[str]]:
    """The names of parts that say less than ``kind``, and of those that say more."""
    below = [part["name"] for part in parts if _ORDER[part["verdict"]["kind"]] < _ORDER[kind]]
    above = [part["name"] for part in parts if _ORDER[part["verdict"]["kind"]] > _ORDER[kind]]
    return below, above


def decisive(parts: Sequence[Json], verdict: Json) -> Json:
    """The part that stands for the whole: the one that decided, else the first that was measured."""
    known = (part for part in parts if part["status"] == "measured")
    return next(part for part in known if verdict["decided_by"] in (part["name"], None))


def _worded(kind: str, sentence: str) -> str:
    """A verdict that begins with its word, as some kinds' verdicts do by themselves."""
    return sentence if sentence.startswith(WORDS[kind]) else f"{WORDS[kind]}. {sentence}"


def _beats_ancestor(results: Json) -> bool:
    """Whether a pruned pair shows what it must show first; any other pair does."""
    if ancestry_sentence(results) is None:
        return True
    test = results["tests"]["mapped_vs_ancestor_copy"]
    outcomes = {accuracy_outcome(test), nats_outcome(test)} - {None}
    return "better" in outcomes and "worse" not in outcomes
