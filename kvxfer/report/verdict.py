"""Does the transfer beat the model that has already run? One sentence, from the paired tests against the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.report.tables import interval, number, p_text, percent, points

LEVEL = 0.05
FEWEST_DOCUMENTS = 30
"""Over fewer a paired t-test leans on normal differences, and an interval that resamples them is too narrow."""

Outcome = Literal["better", "worse", "none"]
Kind = Literal["beats", "none", "worse", "mixed"]

WORDS: dict[str, str] = {"beats": "Worth it", "none": "No benefit", "worse": "Harmful", "mixed": "Mixed"}
"""What each kind of verdict begins with."""


@dataclass(frozen=True)
class Verdict:
    """``kind`` is beats, none, worse or mixed; ``sentence`` says it with its numbers, ``head`` without."""

    kind: Kind
    head: str
    sentence: str


def outcome(p: float, difference: float, ci: Sequence[float], higher_is_better: bool) -> Outcome:
    """A difference counts only when p < 0.05 and its interval excludes zero on the same side."""
    low, high = ci
    if p >= LEVEL or low <= 0 <= high or (difference > 0) != (low > 0):
        return "none"
    return "better" if (difference > 0) == higher_is_better else "worse"


def accuracy_outcome(test: Mapping[str, Any]) -> Outcome | None:
    """Outcome of a test row in accuracy; None when it has none."""
    if test.get("accuracy_p") is None:
        return None
    return outcome(test["accuracy_p"], test["accuracy_difference"], test["accuracy_ci"], higher_is_better=True)


def nats_outcome(test: Mapping[str, Any]) -> Outcome | None:
    """Outcome of a test row in nats per token, where less is better; None when it has none."""
    if test.get("nll_p") is None:
        return None
    return outcome(test["nll_p"], test["nll_difference"], test["nll_ci"], higher_is_better=False)


def _kind(accuracy: Outcome | None, nats: Outcome | None) -> Kind:
    """Accuracy decides where there is one, unless nats say the opposite."""
    kinds: dict[Outcome | None, Kind] = {"better": "beats", "worse": "worse"}
    return "mixed" if {accuracy, nats} == {"better", "worse"} else kinds.get(accuracy or nats, "none")


def _head(subject: str, accuracy: Outcome | None, nats: Outcome | None) -> str:
    if accuracy is None and nats is None:
        return f"{subject} was not compared with the source"
    kind = _kind(accuracy, nats)
    said = {
        "beats": "beats the source",
        "none": "is not shown to beat the source",
        "worse": "is worse than the source",
        "mixed": f"is {accuracy} than the source in accuracy and {nats} in nats",
    }
    head = f"{WORDS[kind]}: {subject[0].lower()}{subject[1:]} {said[kind]}"
    if accuracy is None or nats is None or accuracy == nats or kind == "mixed":
        return head
    second = {
        "better": "in nats it is better",
        "worse": "in nats it is worse",
        "none": "in nats no difference is shown",
    }
    return f"{head} in accuracy ({second[nats]})"


def verdict(
    conditions: Mapping[str, Mapping[str, Any]],
    tests: Mapping[str, Mapping[str, Any]],
    condition: str = "mapped",
    subject: str = "The mapped cache",
) -> Verdict:
    """The sentence about ``condition`` against the source, in accuracy and in nats where there are both."""
    test = tests.get(f"{condition}_vs_source", {})
    accuracy, nats = accuracy_outcome(test), nats_outcome(test)
    head = _head(subject, accuracy, nats)
    parts = []
    if accuracy is not None:
        a, b = conditions[condition]["accuracy"], conditions["source"]["accuracy"]
        parts.append(
            f"accuracy {percent(a)} against {percent(b)} ({points(test['accuracy_difference'])}, "
            f"95 % interval {interval(test['accuracy_ci'])}, exact McNemar {p_text(test['accuracy_p'])})"
        )
    if nats is not None:
        a, b = conditions[condition]["nats"], conditions["source"]["nats"]
        parts.append(
            f"{number(a)} against {number(b)} nats per token ({number(test['nll_difference'], sign=True)}, "
            f"95 % interval {interval(test['nll_ci'], 'number')}, paired t {p_text(test['nll_p'])}; lower is better)"
        )
    return Verdict(_kind(accuracy, nats), head, f"{head}, with {'; '.join(parts)}." if parts else f"{head}.")


def ancestry_sentence(results: Mapping[str, Any]) -> str | None:
    """What a pair whose source was pruned from its target must show first; None for any other pair."""
    ancestry, test = results.get("ancestry"), results["tests"].get("mapped_vs_ancestor_copy")
    if not ancestry or test is None:
        return None
    outcomes = {accuracy_outcome(test), nats_outcome(test)} - {None}
    beaten = "better" in outcomes and "worse" not in outcomes
    said = "it does" if beaten else "that is not shown, so none does"
    count, dropped = len(ancestry["layers"]), ", ".join(map(str, ancestry["dropped"]))
    parts = []
    if test.get("accuracy_p") is not None:
        parts.append(
            f"{points(test['accuracy_difference'])}, 95 % interval {interval(test['accuracy_ci'])}, "
            f"exact McNemar {p_text(test['accuracy_p'])}"
        )
    if test.get("nll_p") is not None:
        parts.append(
            f"{number(test['nll_difference'], sign=True)} nats per token, 95 % interval "
            f"{interval(test['nll_ci'], 'number')}, paired t {p_text(test['nll_p'])}"
        )
    return (
        f"The source is the target without layers {dropped}; {ancestry['identical']} of {count} target layers have "
        "identical caches in both, by construction. No claim stands on this pair unless the mapped cache beats a copy "
        f"of each layer's ancestor: {said} ({'; '.join(parts)})."
    )


def fit_warning(results: Mapping[str, Any]) -> str | None:
    """That a map does less on this text than where it was fitted; None when it does not, or nothing is known.

    It is made from the evaluation's ``fit_check`` (``kvxfer.evals.fit_check``).
    """
    check = results.get("fit_check")
    if not check or check["passed"]:
        return None
    worst, below, outputs = check["worst"], len(check["below"]), len(check["outputs"])
    here = "no finite R²" if worst["r2"] is None else f"R² {number(worst['r2'], 2)}"
    others = (
        "" if below == 1 else f" ({below} of {outputs} target layers and kinds lose more than {check['tolerated']:g})"
    )
    return (
        f"On this text layer {worst['layer']}'s {worst['kind']} have {here}; where the map was fitted it was "
        f"{number(worst['recorded'], 2)}{others}: the map is damaged, or this text is far from its calibration."
    )


def cautions(results: Mapping[str, Any]) -> list[str]:
    """What a reader of the verdict must be warned of."""
    return [each for each in (fit_warning(results), few_documents(results)) if each is not None]


def few_documents(results: Mapping[str, Any]) -> str | None:
    """That the paired tests rest on few documents; None from FEWEST_DOCUMENTS on, or where no test was made."""
    count = results["tests"].get("mapped_vs_source", {}).get("documents")
    if count is None or count >= FEWEST_DOCUMENTS:
        return None
    return (
        f"The items are about {count} documents: below {FEWEST_DOCUMENTS}, p values and intervals are rough. Raise "
        "eval.stories (toy) or corpus.rows.evaluation, or lower corpus.document_tokens."
    )
