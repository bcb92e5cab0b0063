"""Does the transfer beat the model that has already run? One sentence, from the paired tests against the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.evals.tables import interval, number, p_text, percent, points

LEVEL = 0.05
Outcome = Literal["better", "worse", "none"]


@dataclass(frozen=True)
class Verdict:
    """``kind`` is beats, none, worse or mixed; ``sentence`` says it with its numbers, ``head`` without."""

    kind: Literal["beats", "none", "worse", "mixed"]
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


def _head(subject: str, accuracy: Outcome | None, nats: Outcome | None) -> str:
    alone = {
        "better": f"{subject} beats the source",
        "worse": f"{subject} is worse than the source",
        "none": f"No benefit of {subject[0].lower()}{subject[1:]} over the source is shown",
    }
    first = accuracy or nats
    if first is None:
        return f"{subject} was not compared with the source"
    if accuracy is None or nats is None or accuracy == nats:
        return alone[first]
    if "none" not in (accuracy, nats):
        return f"Mixed: {subject[0].lower()}{subject[1:]} is {accuracy} than the source in accuracy and {nats} in nats"
    second = {
        "better": "it is better in nats",
        "worse": "it is worse in nats",
        "none": "in nats no difference is shown",
    }
    return f"{alone[accuracy]} in accuracy; {second[nats]}"


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
    known = {accuracy, nats} - {None, "none"}
    kinds: dict[Outcome | None, Literal["beats", "none", "worse"]] = {"better": "beats", "worse": "worse"}
    kind = "mixed" if len(known) == 2 else kinds.get(accuracy or nats, "none")
    return Verdict(kind, head, f"{head}: {'; '.join(parts)}." if parts else f"{head}.")


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
