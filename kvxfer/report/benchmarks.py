"""Published benchmarks (``lm_eval``): every benchmark under its conditions, the tests, and how they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from matplotlib.axes import Axes

from kvxfer.evals.statistics import Outcome, outcome, paired_item
from kvxfer.report.figures import COLOURS, CONTROL, LINE, MUTED, SHARES, canvas, label, tidy
from kvxfer.report.kind_report import FirstScreen, Json, KindReport
from kvxfer.report.numbers import NOTHING, interval, p_value, percent, percent_in, points
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import KINDS, SAID, WORDS, Verdict, in_accuracy, judged, led, power
from kvxfer.report.wording import condition_name

FIGURE = "lm_eval_benchmarks.png"
_SHOWN = ("ceiling", "source", "mapped", "floor")
_SPREAD = 0.19
"""Between the rows of one benchmark, which has a height of 1."""


class BenchmarksReport(KindReport):
    """All samples together against the source, then every task by itself, corrected for their number."""

    heading = "Published benchmarks"
    logged = "eval/lm_eval"

    def verdict(self, data: Json) -> Verdict:
        pooled, single = data["pooled"], data["benchmarks"]
        tests = pooled["tests"]
        test = tests["mapped_vs_source"]
        overall = _outcome(test)
        by_task = {each["name"]: _outcome(each["tests"]["mapped_vs_source"]) for each in single}
        counted = pooled["benchmarks"]
        where = f"on {counted[0]}" if len(counted) == 1 else f"on {len(counted)} benchmarks"
        mixed = {"better", "worse"} <= {overall, *by_task.values()}
        kind, head = judged(tests, "The mapped cache", where)
        if mixed and kind != "unable":
            kind, head = "mixed", f"{WORDS['mixed']}: the mapped cache {SAID[KINDS[overall]]} {where}"
        scores = (percent(pooled["conditions"][name]["accuracy"]) for name in ("mapped", "source"))
        lead = led(kind, head, f"The mapped cache {where}")
        said = in_accuracy(test, _test_name(test))
        sentence = f"{lead} {' against '.join(scores)} of {test['n']} questions ({said})"
        if left_out := [each["name"] for each in single if each["name"] not in counted]:
            sentence += f", without {' and '.join(left_out)}, whose answers are not simply right or wrong"
        if len(single) > 1:
            words = {"better": "better on", "worse": "worse on", "none": "no difference shown on"}
            groups = {said: [name for name, found in by_task.items() if found == key] for key, said in words.items()}
            listed = ", ".join(f"{said} {' and '.join(names)}" for said, names in groups.items() if names)
            sentence += f"; by benchmark, corrected for their number (Holm): {listed}"
        return Verdict(kind, head, " ".join([f"{sentence}.", *power(tests)]))

    def first_screen(self, data: Json) -> FirstScreen:
        rows = []
        for each in _benchmarks(data):
            conditions, test = each["conditions"], each["tests"]["mapped_vs_source"]
            scores = (percent_in(conditions[name], "accuracy") for name in _SHOWN[:3])
            recovered = (percent(conditions["mapped"][f"{base}_recovered"]) for base in ("gap", "context"))
            rows.append((each["name"], *scores, *recovered, p_value(test["accuracy_p"])))
        names = (condition_name(name, short=True) for name in _SHOWN[:3])
        table = Table(("Benchmark", *names, "Gap recovered", "Context recovered", "p, source"), rows)
        tests = [(each["name"], each["tests"]["mapped_vs_source"]) for each in data["benchmarks"]]
        against = [
            f"{name}: worse than the source by {points(-test['accuracy_difference'])}."
            for name, test in tests
            if _outcome(test) == "worse"
        ]
        return FirstScreen(table, f"figures/{FIGURE}", "Scores by benchmark with 95 % intervals", against)

    def sections(self, data: Json) -> str:
        others = [
            (each["name"], measure, *(percent(values[name]) for name in _SHOWN))
            for each in data["benchmarks"]
            for measure, values in each["others"].items()
        ]
        names = (condition_name(name, short=True) for name in _SHOWN)
        return fill(
            "benchmarks",
            **data,
            conditions=_conditions_table(data),
            tests=_tests_table(data),
            asked=_asked_table(data),
            others=Table(("Benchmark", "Measure", *names), others) if others else None,
        )

    def metrics(self, data: Json) -> dict[str, float]:
        flat: dict[str, float] = {}
        for each in (*data["benchmarks"], {"name": "pooled", **data["pooled"]}):
            flat |= {f"{each['name']}/{name}/score": row["accuracy"] for name, row in each["conditions"].items()}
            for key in ("retention_floor_normalised", "gap_recovered", "context_recovered"):
                if (value := each["conditions"]["mapped"][key]) is not None:
                    flat[f"{each['name']}/mapped/{key}"] = value
        return flat

    def by_task(self, data: Json) -> dict[str, Json]:
        return {each["name"]: each["conditions"] for each in data["benchmarks"]}

    def paired(self, data: Json) -> dict[str, list[Json]]:
        """Every sample, by benchmark: right or wrong, or its score where that is neither."""

        def item(sample: Json, binary: bool) -> Json:
            score = sample["scores"][sample["measure"]]["mapped"]
            return paired_item(sample, correct=score == 1) if binary else paired_item(sample, score=score)

        return {b["name"]: [item(sample, b["binary"]) for sample in b["samples"]] for b in data["benchmarks"]}

    def figures(self, data: Json, folder: Path) -> None:
        """A group of four rows for every benchmark, each a dot with its 95 % interval; chance is a dotted mark."""
        benchmarks = data["benchmarks"]
        with canvas(folder / FIGURE, (8.2, 0.95 * len(benchmarks) + 1.5)) as figure:
            axes = figure.subplots()
            for y, each in enumerate(benchmarks):
                _group(axes, y, each)
            axes.set_yticks(range(len(benchmarks)), [each["name"] for each in benchmarks])
            axes.set_ylim(len(benchmarks) - 0.45, -0.55)
            axes.set_xlim(0, 1.1)
            axes.set_xticks(*SHARES)
            axes.set_xlabel("score, 95 % interval; dotted: chance")
            tidy(axes, "x")
            for y in range(1, len(benchmarks)):
                axes.axhline(y - 0.5, color=LINE, linewidth=0.8)
            shown = [(condition_name(name), COLOURS.get(name, CONTROL)) for name in _SHOWN]
            handles = [axes.plot([], [], "o", color=colour, label=name)[0] for name, colour in shown]
            figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=9)


def _outcome(test: Json) -> Outcome:
    p = test.get("accuracy_p_holm", test["accuracy_p"])
    return outcome(p, test["accuracy_difference"], test["accuracy_ci"], higher_is_better=True)


def _test_name(test: Json) -> str:
    return "exact McNemar" if test["test"] == "mcnemar" else "paired t"


def _benchmarks(data: Json) -> list[Json]:
    """Every benchmark, and all of them together where there are several."""
    pooled = data["pooled"]
    return [*data["benchmarks"], *([{"name": "all together", **pooled}] if len(pooled["benchmarks"]) > 1 else [])]


def _conditions_table(data: Json) -> Table:
    return Table.of(
        [(each["name"], name, row) for each in _benchmarks(data) for name, row in each["conditions"].items()],
        ("Benchmark", lambda row: f"**{row[0]}**" if row[1] == "ceiling" else ""),
        ("Condition", lambda row: condition_name(row[1])),
        ("Score", lambda row: percent(row[2]["accuracy"])),
        ("95 %", lambda row: interval(row[2]["accuracy_ci"])),
        ("Retention", lambda row: percent(row[2]["retention"])),
        ("Floor-normalised", lambda row: percent(row[2]["retention_floor_normalised"])),
        ("Gap recovered", lambda row: percent(row[2]["gap_recovered"])),
        ("Context recovered", lambda row: percent(row[2]["context_recovered"])),
    )


def _tests_table(data: Json) -> Table:
    return Table.of(
        [
            {
                "name": b["name"],
                "compared": " vs ".join(condition_name(n, short=True) for n in key.split("_vs_")),
                **test,
            }
            for b in _benchmarks(data)
            for key, test in b["tests"].items()
        ],
        ("Benchmark", itemgetter("name")),
        ("Comparison", itemgetter("compared")),
        ("Difference", lambda test: points(test["accuracy_difference"])),
        ("95 %", lambda test: interval(test["accuracy_ci"])),
        ("Test", _test_name),
        ("p", lambda test: p_value(test["accuracy_p"])),
        ("p (Holm)", lambda test: p_value(test.get("accuracy_p_holm"))),
        ("Samples", itemgetter("n")),
        ("Documents", itemgetter("documents")),
    )


def _asked_table(data: Json) -> Table:
    """How the benchmarks were asked: what a reader needs to ask them again."""
    return Table.of(
        data["benchmarks"],
        ("Benchmark", itemgetter("name")),
        ("Kind", itemgetter("kind")),
        ("Score is", itemgetter("measure")),
        ("Answers read by", lambda each: NOTHING if each["filter"] == "none" else each["filter"]),
        ("Chance", lambda each: percent(each["chance"])),
        ("Shots", itemgetter("shots")),
        ("Samples", itemgetter("n")),
        ("Of", itemgetter("available")),
        ("Version", lambda each: _versions(each["versions"])),
    )


def _versions(versions: Json) -> str:
    distinct: Sequence[str] = sorted({str(value) for value in versions.values()})
    count = f" ({len(versions)} tasks)" if len(versions) > 1 else ""
    return ", ".join(distinct) + count


def _group(axes: Axes, y: int, benchmark: Json) -> None:
    if benchmark["chance"]:
        axes.plot([benchmark["chance"]] * 2, [y - 0.42, y + 0.42], ":", color=MUTED, linewidth=1.3, zorder=2)
    for place, name in enumerate(_SHOWN):
        row = benchmark["conditions"][name]
        height, colour = y + (place - 1.5) * _SPREAD, COLOURS.get(name, CONTROL)
        axes.plot(row["accuracy_ci"], [height, height], color=colour, linewidth=2.2, zorder=3)
        axes.plot(row["accuracy"], height, "o", markersize=7, color=colour, zorder=4)
        text = f"{100 * row['accuracy']:.1f} %"
        weight = "bold" if name == "mapped" else "normal"
        at = (max(row["accuracy_ci"][1], row["accuracy"]), height)
        label(axes, text, at, (7, 0), va="center", fontweight=weight)
