"""Does the transfer beat the model that has already run? One sentence, from the paired tests against the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.evals.statistics import SEEN_WITH_80, Outcome, items_needed, outcome
from kvxfer.report.numbers import interval, number, p_text, percent, points
from kvxfer.report.prose import capital

FEWEST_DOCUMENTS = 30
"""Over fewer a paired t-test leans on normal differences, and an interval that resamples them is too narrow."""

MOST_ITEMS = 1_000_000
"""More would be no advice."""

Kind = Literal["beats", "none", "worse", "mixed", "unable"]

WORDS: dict[str, str] = {
    "beats": "Worth it",
    "none": "No benefit",
    "worse": "Harmful",
    "mixed": "Mixed",
    "unable": "Cannot tell",
}
"""What each kind of verdict begins with."""

KINDS: dict[Outcome, Kind] = {"better": "beats", "worse": "worse", "none": "none"}
SAID = {
    "beats": "beats the source",
    "none": "is not shown to beat the source",
    "worse": "is worse than the source",
}
CONTROLS = {
    "no_context": "no context at all",
    "floor": "a zeroed cache",
    "raw_copy": "a raw copy of the source's cache",
    "ancestor_copy": "a copy of each layer's ancestor",
}
"""What costs no map (``kvxfer.evals.statistics.NOTHING_HANDED``), as a sentence calls it."""

MEASURES = {"accuracy": "accuracy", "nll": "nats"}


@dataclass(frozen=True)
class Verdict:
    """``kind`` is beats, none, worse, mixed or unable; ``sentence`` says it with its numbers, ``head`` without."""

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
    p, difference, ci = (test[f"{key}_{part}"] for part in ("p", "difference", "ci"))
    return outcome(p, difference, ci, higher_is_better, test.get(f"{key}_sign_p"), test.get(f"{key}_above") or 0.5)


def beats(test: Mapping[str, Any]) -> bool:
    """Whether a test shows the first better in one measure, and worse in none."""
    return "better" in (found := outcomes(test)) and "worse" not in found


def unbeaten(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What costs no map and is not shown to be worse than the mapped cache, of all that was measured."""
    against = {name: tests.get(f"mapped_vs_{name}") for name in CONTROLS}
    return [name for name, test in against.items() if test is not None and not beats(test)]


def source_is_worth_something(tests: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the source alone beats the target without context, or was not compared with it."""
    test = tests.get("source_vs_no_context")
    return test is None or beats(test)


def _deciding(tests: Mapping[str, Mapping[str, Any]]) -> dict[str, Outcome]:
    """By measure what the mapped cache is against the source, where the target is shown to have a lead to win."""
    lead, found = outcomes(tests.get("source_vs_ceiling", {})), outcomes(tests["mapped_vs_source"])
    compared = "source_vs_ceiling" in tests
    return {
        measure: each
        for measure, each, room in zip(MEASURES, found, lead, strict=True)
        if each is not None and (not compared or room == "worse")
    }


def _kind(tests: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Accuracy decides where it can, unless nats say the opposite."""
    if not source_is_worth_something(tests) or not (found := _deciding(tests)):
        return "unable"
    if set(outcomes(tests["mapped_vs_source"])) >= {"better", "worse"}:
        return "mixed"
    kind = KINDS[next(iter(found.values()))]
    return "none" if kind == "beats" and unbeaten(tests) else kind


def judged(tests: Mapping[str, Mapping[str, Any]], subject: str, where: str = "") -> tuple[Kind, str]:
    """The kind of verdict that some tests come to, and its head; ``where`` follows what the subject does there."""
    return _kind(tests), _head(tests, subject, f" {where}" if where else "")


def _head(tests: Mapping[str, Mapping[str, Any]], subject: str, where: str) -> str:
    subject = f"{subject[0].lower()}{subject[1:]}"
    kind, found = _kind(tests), _deciding(tests)
    if not source_is_worth_something(tests):
        return (
            f"{WORDS[kind]}: this pair cannot show a transfer's worth, since its source is not shown to beat the "
            "target without any context"
        )
    if not found:
        return f"{WORDS[kind]}: the target itself is not shown to beat the source"
    accuracy, nats = outcomes(tests["mapped_vs_source"])
    if kind == "mixed":
        return f"{WORDS[kind]}: {subject} is {accuracy} than the source in accuracy and {nats} in nats"
    measure, own = next(iter(found.items()))
    head = f"{WORDS[kind]}: {subject} {SAID[KINDS[own]]}{where}"
    if own == "better" and (rest := unbeaten(tests)):
        return f"{head}, but is not shown to beat {' or '.join(CONTROLS[name] for name in rest)}"
    if accuracy is None or nats is None or accuracy == nats:
        return head
    other, also = ("nats", nats) if measure == "accuracy" else ("accuracy", accuracy)
    says = {"better": "it is better", "worse": "it is worse", "none": "no difference is shown"}
    return f"{head} in {MEASURES[measure]} (in {other} {says[also]})"


def in_accuracy(test: Mapping[str, Any], name: str = "exact McNemar") -> str:
    """A test row's difference in accuracy, with its interval and the p of the test of that name."""
    ci, p = interval(test["accuracy_ci"]), p_text(test["accuracy_p"])
    return f"{points(test['accuracy_difference'])}, 95 % interval {ci}, {name} {p}"


def in_nats(test: Mapping[str, Any], unit: str = "") -> str:
    """The same in nats; ``unit`` follows the difference."""
    difference, ci = number(test["nll_difference"], sign=True), interval(test["nll_ci"], "number")
    said = f"{difference}{unit}, 95 % interval {ci}, paired t {p_text(test['nll_p'])}"
    if test.get("nll_sign_p") is None:
        return said
    return f"{said}; higher in {percent(test['nll_above'])} of the documents, sign test {p_text(test['nll_sign_p'])}"


def verdict(
    conditions: Mapping[str, Mapping[str, Any]],
    tests: Mapping[str, Mapping[str, Any]],
    subject: str = "The mapped cache",
) -> Verdict:
    """The sentence about the mapped cache against the source, in accuracy and in nats where there are both.

    It is worth something only where the source is (against the target without any context), where the target has a lead
    over the source that a measure shows, and where everything that costs no map is beaten too.
    """
    test = tests.get("mapped_vs_source", {})
    accuracy, nats = outcomes(test)
    if accuracy is None and nats is None:
        head = f"{subject} was not compared with the source"
        return Verdict("none", head, f"{head}.")
    kind, head = judged(tests, subject)
    parts = []
    if accuracy is not None:
        a, b = (percent(conditions[name]["accuracy"]) for name in ("mapped", "source"))
        parts.append(f"accuracy {a} against {b} ({in_accuracy(test)})")
    if nats is not None:
        a, b = (number(conditions[name]["nats"]) for name in ("mapped", "source"))
        parts.append(f"{a} against {b} nats per token ({in_nats(test)}; lower is better)")
    said = [f"{led(kind, head, subject)} {'; '.join(parts)}.", *power(tests)]
    return Verdict(kind, head, " ".join(said))


def led(kind: Kind, head: str, subject: str) -> str:
    """What stands before the numbers of a subject and the source; a head that tells of the pair does not name them."""
    return f"{head}. {subject} against the source:" if kind == "unable" else f"{head}, with"


def power(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of the measures that decide nothing: why, what so many items could show, and how many would show the rest."""
    found, deciding = [], _deciding(tests)
    test = tests["mapped_vs_source"]
    for measure, own in zip(MEASURES, outcomes(test), strict=True):
        if own is None:
            continue
        if measure not in deciding:
            lead = tests["source_vs_ceiling"]
            said = (
                f"{capital(MEASURES[measure])} cannot decide: the target's own lead over the source is not shown in it"
            )
            found.append(f"{said} ({_could(lead, measure)}).")
        elif own == "none":
            found.append(f"In {MEASURES[measure]} {_could(test, measure)}.")
    return found


def _could(test: Mapping[str, Any], measure: str) -> str:
    """What a test could have shown, and what it would take to show the difference that it found."""
    n, difference, se = test["n"], test[f"{measure}_difference"], test[f"{measure}_se"]

    def size(value: float) -> str:
        return points(value).lstrip("+") if measure == "accuracy" else f"{number(value)} nats per token"

    if se is None:
        return f"{n} items of one document show nothing"
    said = f"{n} items show a difference of {size(SEEN_WITH_80 * se)} four times in five"
    needed = items_needed(difference, se, n)
    if needed is None or needed > MOST_ITEMS:
        return said
    return f"{said}; the {size(abs(difference))} found would take about {float(f'{needed:.2g}'):,.0f}"


def ancestry_sentence(data: Mapping[str, Any]) -> str | None:
    """How source and target are kin on a pair whose source was pruned from its target; None for any other pair."""
    ancestry = data.get("ancestry")
    if not ancestry or (test := data["tests"].get("mapped_vs_ancestor_copy")) is None:
        return None
    said = "it does" if beats(test) else "that is not shown, so none does"
    count, dropped = len(ancestry["layers"]), ", ".join(map(str, ancestry["dropped"]))
    kin = (
        f"The source is the target without layers {dropped}; {ancestry['identical']} of {count} target layers have "
        "identical caches in both, by construction."
    )
    if ancestry["healed"]:
        kin = f"The source was made of the target without layers {dropped}, and healed by distillation."
    parts = [in_accuracy(test)] if test.get("accuracy_p") is not None else []
    parts += [in_nats(test, " nats per token")] if test.get("nll_p") is not None else []
    return (
        f"{kin} No claim stands on this pair unless the mapped cache beats a copy of each layer's ancestor: {said} "
        f"({'; '.join(parts)})."
    )


def fit_warning(data: Mapping[str, Any]) -> str | None:
    """That a map does less on this text than where it was fitted; None when it does not, or nothing is known.

    It is made from the evaluation's ``fit_check`` (``kvxfer.evals.fit_check``).
    """
    check = data.get("fit_check")
    if not check or check["passed"]:
        return None
    worst, beyond, outputs = check["worst"], len(check["beyond"]), len(check["outputs"])
    r2 = "no finite R²" if worst["r2"] is None else f"R² {number(worst['r2'], 2)}"
    more = "" if worst["ratio"] is None else f", {worst['ratio']:.1f} times as much left unexplained"
    mean = "" if check["mean"] is None else f"; in the mean of all it is {check['mean']:.2f} times"
    return (
        f"On this text layer {worst['layer']}'s {worst['kind']} have {r2}; where the map was fitted it was "
        f"{number(worst['recorded'], 2)}{more} ({beyond} of {outputs} target layers and kinds leave more than "
        f"{check['tolerated']:g} times as much{mean}): the map is damaged, or this text is far from its calibration."
    )


def few_documents(data: Mapping[str, Any]) -> str | None:
    """That the paired tests rest on few documents; None from FEWEST_DOCUMENTS on, or where no test was made."""
    count = data["tests"].get("mapped_vs_source", {}).get("documents")
    if count is None or count >= FEWEST_DOCUMENTS:
        return None
    return (
        f"The items are about {count} documents: below {FEWEST_DOCUMENTS}, p values and intervals are rough. Raise "
        "eval.stories (toy) or corpus.rows.evaluation, or add documents."
    )
