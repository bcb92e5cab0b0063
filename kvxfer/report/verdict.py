"""Does the transfer beat the model that has already run? One sentence, from the paired tests against the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.evals.statistics import Outcome, outcome
from kvxfer.report.numbers import interval, number, p_text, percent, points

FEWEST_DOCUMENTS = 30
"""Over fewer a paired t-test leans on normal differences, and an interval that resamples them is too narrow."""

Kind = Literal["beats", "none", "worse", "mixed"]

WORDS: dict[str, str] = {"beats": "Worth it", "none": "No benefit", "worse": "Harmful", "mixed": "Mixed"}
"""What each kind of verdict begins with."""

KINDS: dict[Outcome, Kind] = {"better": "beats", "worse": "worse", "none": "none"}
SAID = {
    "beats": "beats the source",
    "none": "is not shown to beat the source",
    "worse": "is worse than the source",
}


@dataclass(frozen=True)
class Verdict:
    """``kind`` is beats, none, worse or mixed; ``sentence`` says it with its numbers, ``head`` without."""

    kind: Kind
    head: str
    sentence: str

    def reworded(self, words: Mapping[str, str], more: str) -> Verdict:
        """The same with other words for some, and with another sentence behind it."""
        head, sentence = self.head, self.sentence
        for plain, meant in words.items():
            head, sentence = head.replace(plain, meant), sentence.replace(plain, meant)
        return Verdict(self.kind, head, f"{sentence} {more}".rstrip())


def outcomes(test: Mapping[str, Any]) -> tuple[Outcome | None, Outcome | None]:
    """Outcomes of a test row in accuracy and in nats per token, where less is better; None for what it has not."""
    return _outcome(test, "accuracy", higher_is_better=True), _outcome(test, "nll", higher_is_better=False)


def _outcome(test: Mapping[str, Any], key: str, higher_is_better: bool) -> Outcome | None:
    if test.get(f"{key}_p") is None:
        return None
    return outcome(test[f"{key}_p"], test[f"{key}_difference"], test[f"{key}_ci"], higher_is_better)


def _kind(accuracy: Outcome | None, nats: Outcome | None) -> Kind:
    """Accuracy decides where there is one, unless nats say the opposite."""
    return "mixed" if {accuracy, nats} == {"better", "worse"} else KINDS[accuracy or nats or "none"]


def _head(subject: str, accuracy: Outcome | None, nats: Outcome | None) -> str:
    if accuracy is None and nats is None:
        return f"{subject} was not compared with the source"
    kind = _kind(accuracy, nats)
    said = SAID.get(kind, f"is {accuracy} than the source in accuracy and {nats} in nats")
    head = f"{WORDS[kind]}: {subject[0].lower()}{subject[1:]} {said}"
    if accuracy is None or nats is None or accuracy == nats or kind == "mixed":
        return head
    second = {
        "better": "in nats it is better",
        "worse": "in nats it is worse",
        "none": "in nats no difference is shown",
    }
    return f"{head} in accuracy ({second[nats]})"


def in_accuracy(test: Mapping[str, Any], name: str = "exact McNemar") -> str:
    """A test row's difference in accuracy, with its interval and the p of the test of that name."""
    ci, p = interval(test["accuracy_ci"]), p_text(test["accuracy_p"])
    return f"{points(test['accuracy_difference'])}, 95 % interval {ci}, {name} {p}"


def in_nats(test: Mapping[str, Any], unit: str = "") -> str:
    """The same in nats; ``unit`` follows the difference."""
    difference, ci = number(test["nll_difference"], sign=True), interval(test["nll_ci"], "number")
    return f"{difference}{unit}, 95 % interval {ci}, paired t {p_text(test['nll_p'])}"


def verdict(
    conditions: Mapping[str, Mapping[str, Any]],
    tests: Mapping[str, Mapping[str, Any]],
    subject: str = "The mapped cache",
) -> Verdict:
    """The sentence about the mapped cache against the source, in accuracy and in nats where there are both."""
    test = tests.get("mapped_vs_source", {})
    accuracy, nats = outcomes(test)
    head = _head(subject, accuracy, nats)
    parts = []
    if accuracy is not None:
        a, b = (percent(conditions[name]["accuracy"]) for name in ("mapped", "source"))
        parts.append(f"accuracy {a} against {b} ({in_accuracy(test)})")
    if nats is not None:
        a, b = (number(conditions[name]["nats"]) for name in ("mapped", "source"))
        parts.append(f"{a} against {b} nats per token ({in_nats(test)}; lower is better)")
    return Verdict(_kind(accuracy, nats), head, f"{head}, with {'; '.join(parts)}." if parts else f"{head}.")


def beats_ancestor(data: Mapping[str, Any]) -> bool:
    """Whether a pruned pair shows what it must show first; any other pair does."""
    if not data.get("ancestry") or (test := data["tests"].get("mapped_vs_ancestor_copy")) is None:
        return True
    return "better" in (found := outcomes(test)) and "worse" not in found


def ancestry_sentence(data: Mapping[str, Any]) -> str | None:
    """What a pair whose source was pruned from its target must show first; None for any other pair."""
    ancestry = data.get("ancestry")
    if not ancestry or (test := data["tests"].get("mapped_vs_ancestor_copy")) is None:
        return None
    said = "it does" if beats_ancestor(data) else "that is not shown, so none does"
    count, dropped = len(ancestry["layers"]), ", ".join(map(str, ancestry["dropped"]))
    parts = [in_accuracy(test)] if test.get("accuracy_p") is not None else []
    parts += [in_nats(test, " nats per token")] if test.get("nll_p") is not None else []
    return (
        f"The source is the target without layers {dropped}; {ancestry['identical']} of {count} target layers have "
        "identical caches in both, by construction. No claim stands on this pair unless the mapped cache beats a copy "
        f"of each layer's ancestor: {said} ({'; '.join(parts)})."
    )


def fit_warning(data: Mapping[str, Any]) -> str | None:
    """That a map does less on this text than where it was fitted; None when it does not, or nothing is known.

    It is made from the evaluation's ``fit_check`` (``kvxfer.evals.fit_check``).
    """
    check = data.get("fit_check")
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


def few_documents(data: Mapping[str, Any]) -> str | None:
    """That the paired tests rest on few documents; None from FEWEST_DOCUMENTS on, or where no test was made."""
    count = data["tests"].get("mapped_vs_source", {}).get("documents")
    if count is None or count >= FEWEST_DOCUMENTS:
        return None
    return (
        f"The items are about {count} documents: below {FEWEST_DOCUMENTS}, p values and intervals are rough. Raise "
        "eval.stories (toy) or corpus.rows.evaluation, or lower corpus.document_tokens."
    )
