"""Free decoding (``generation``): is the answer right, and when does the text part from the ceiling's?"""

from __future__ import annotations

from pathlib import Path

from kvxfer.evals.statistics import paired_item
from kvxfer.report.figures import COLOURS, CONTROL, Panel, Series, series_figure
from kvxfer.report.kind_report import FirstScreen, Json, KindReport, numbers_of
from kvxfer.report.numbers import difference, number_in, percent, percent_in
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import Verdict, verdict
from kvxfer.report.wording import condition_name

MODES = ("greedy", "sampled")
STEPS = "generation_steps.png"


class GenerationReport(KindReport):
    """Exact match where there are answers, and how far from the ceiling's predictions."""

    heading = "Free decoding"
    logged = "eval/generation"

    def verdict(self, data: Json) -> Verdict:
        named = {"nll": "kl", "accuracy": "exact"}
        keys = ("p", "difference", "ci", "se", "sign_p", "above")
        tests = {
            name: {f"{a}_{key}": test.get(f"{b}_{key}") for a, b in named.items() for key in keys} | {"n": test["n"]}
            for name, test in data["tests"].items()
        }
        found = {
            name: {"accuracy": data["conditions"][name]["exact"], "nats": data["conditions"][name]["kl"]}
            for name in ("mapped", "source")
        }
        said = verdict(found, tests, subject="Writing from the mapped cache")
        words = {
            "accuracy": "exact match",
            "nats per token": "nats of KL from the ceiling per token",
            "in nats": "in KL",
            "In nats": "In KL",
            "Nats cannot": "KL cannot",
            "Accuracy cannot": "Exact match cannot",
        }
        return said.reworded(words, _divergence_sentence(data))

    def first_screen(self, data: Json) -> FirstScreen:
        headings = ("Condition", "Exact match", "Agreement", "Never parts", "Parts", "KL")
        row = data["conditions"]["mapped"]
        said = [f"{percent(1 - row['never'])} of its greedy texts are not the ceiling's to the end."]
        against = said if row["never"] < 1 else []
        caption = "Agreement with the ceiling and KL from it, token by token"
        return FirstScreen(_conditions_table(data).only(*headings), f"figures/{STEPS}", caption, against)

    def sections(self, data: Json) -> str:
        written = [
            (f"… {example['prompt']}", condition_name(name, short=True), example[name])
            for example in data["examples"]
            for name in data["conditions"]
        ]
        return fill(
            "generation",
            **data,
            table=_conditions_table(data),
            test=data["tests"]["mapped_vs_ceiling"],
            test_table=_tests_table(data),
            written=Table(("After", "By", "Greedily"), written, right=False),
        )

    def metrics(self, data: Json) -> dict[str, float]:
        return numbers_of(data["conditions"])

    def paired(self, data: Json) -> dict[str, list[Json]]:
        items = [paired_item(i, nats=i["kl"]["mapped"], correct=i["exact"]["mapped"]) for i in data["items"]]
        return {"exact match, KL from the ceiling" if data["answers"] else "KL from the ceiling": items}

    def figures(self, data: Json, folder: Path) -> None:

        def lines(measure: str, least: float | None = None) -> list[Series]:
            found = []
            for name, step in data["steps"].items():
                values, ends = step[measure], step[f"{measure}_ci"]
                if least is not None:
                    values, ends = [max(v, least) for v in values], [[max(e, least) for e in pair] for pair in ends]
                places = range(1, len(values) + 1)
                found.append(Series(condition_name(name, short=True), places, values, ends, COLOURS.get(name, CONTROL)))
            return found

        agreement = Panel("tokens that are the ceiling's", "new token", lines("agreement"), limits=(0.0, 1.03))
        kl = Panel("KL from the ceiling (nats)", "new token", lines("kl", 1e-6), log=True)
        series_figure([agreement, kl], folder / STEPS)
        modes = MODES if data["samples"] else MODES[:1]
        panels = [
            Panel(f"texts still the ceiling's, {mode}", "new tokens", lines(f"same_{mode}"), limits=(0.0, 1.03))
            for mode in modes
        ]
        series_figure(panels, folder / "generation_divergence.png")


def _divergence_sentence(data: Json) -> str:
    """When the mapped cache's text parts from the ceiling's."""
    row = data["conditions"]["mapped"]
    never = f"{percent(row['never'])} of the greedy texts are the ceiling's for all {data['new_tokens']} tokens"
    if row["parts"] is None:
        return f"{never}."
    return f"{never}; the median text parts from it at token {row['parts']:g}."


def _conditions_table(data: Json) -> Table:
    """Greedy and sampled columns side by side."""
    header = ("Condition", "Exact match", "Agreement", "Never parts", "Parts", "KL", "Same top token")
    sampled = ("Exact match (sampled)", "Agreement (sampled)", "Never parts (sampled)", "Parts (sampled)")
    rows = []
    for name, row in data["conditions"].items():
        greedy = (percent_in(row, key) for key in ("exact", "agreement", "never"))
        cells = (condition_name(name), *greedy, _place(row["parts"], row["never"]), number_in(row, "kl"))
        drawn = (percent(row[f"{key}_sampled"]) for key in ("exact", "agreement", "never"))
        rows.append((*cells, percent(row["top"]), *drawn, _place(row["parts_sampled"], row["never_sampled"])))
    return Table((*header, *sampled), rows)


def _place(median: float | None, never: float | None) -> str:
    return "" if never is None else "after the last" if median is None else f"{median:g}"


def _tests_table(data: Json) -> Table:
    """First minus second on the same prompts."""
    measures = {
        "exact": "Exact match",
        "exact_sampled": "Exact match (sampled)",
        "agreement": "Agreement",
        "agreement_sampled": "Agreement (sampled)",
        "kl": "KL (nats)",
    }
    rows = []
    for key, test in data["tests"].items():
        first, _, other = key.partition("_vs_")
        for measure, label in measures.items():
            # All of these are set against the ceiling as they are.
            if test[f"{measure}_difference"] is None or (other == "ceiling" and not measure.startswith("exact")):
                continue
            kind = "exact McNemar" if measure == "exact" else "paired t"
            name = f"{label}, {condition_name(first, short=True)} vs {condition_name(other, short=True)}"
            rows.append((name, *difference(test, measure, measure != "kl"), kind))
    return Table(("Measure", "Difference", "95 %", "p", "Test"), rows)
