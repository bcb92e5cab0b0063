"""Questions with answers, or text that follows (``items``): the headline table, its tests, and what speaks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table

from kvxfer.evals.statistics import holm, summarise
from kvxfer.report.figures import conditions_figure
from kvxfer.report.fit_figures import r2_heatmap
from kvxfer.report.kind_report import FirstScreen, Json, KindReport, numbers_of
from kvxfer.report.numbers import (
    difference,
    number,
    number_in,
    p_value,
    percent,
    percent_in,
    perplexity,
    points,
    setting,
)
from kvxfer.report.prose import capital, fill, listed
from kvxfer.report.table import Table
from kvxfer.report.verdict import (
    Verdict,
    ancestry_sentence,
    few_documents,
    fit_warning,
    in_accuracy,
    in_nats,
    outcomes,
    verdict,
)
from kvxfer.report.wording import condition_name

CONDITIONS_FIGURE, HEATMAP = "figures/conditions.png", "figures/r2.png"
RATIOS = (
    *("retention", "retention_floor_normalised", "gap_recovered", "gap_recovered_nats"),
    *("context_recovered", "context_recovered_nats"),
)
MEASURES = (
    *("Accuracy", "Generated", "Perplexity", "Nats per token"),
    *("Retention", "Floor-normalised", "Gap recovered", "Gap recovered (nats)"),
    *("Context recovered", "Context recovered (nats)"),
)
NARROW = (
    *("Condition", "Accuracy [95 %]", "Nats per token [95 %]", "Gap recovered", "Context recovered"),
    *("p, vs source", "p, in nats"),
)
DECISIVE = ("ceiling", "source", "mapped", "ancestor_copy", "no_context", "floor")
"""The conditions of the first screen."""

CONTROLS = ("floor", "raw_copy", "wrong_donor", "random_map", "no_context")
KEPT = {
    "retention": "{} of the ceiling's accuracy is kept",
    "retention_floor_normalised": "{} of what lies above chance",
    "gap_recovered": "{} of the gap between source and ceiling is recovered in accuracy",
    "context_recovered": "{} of what the context is worth to the target arrives in accuracy",
}
IN_NATS = {"gap": "the gap", "context": "the context's worth"}
FURTHER = {
    "story_only": (
        "When only the story is handed over",
        "The cache holds the story alone; the target reads the question itself.",
    )
}
"""Titles and notes of further tables."""

SWEPT = (
    *("accuracy", "nats", "perplexity", "retention_floor_normalised", "gap_recovered", "gap_recovered_nats"),
    *("context_recovered", "context_recovered_nats"),
)
SWEPT_WITH_INTERVALS = ("accuracy", "nats", "gap_recovered", "gap_recovered_nats")
LOGGED = ("accuracy", "perplexity", "nats", "retention_floor_normalised", "gap_recovered")
STYLES = {"better": "green", "worse": "red", "none": "yellow"}


class QuestionsReport(KindReport):
    """Every condition against the source, in accuracy where there are answers and in nats."""

    heading = "Questions, or text that follows"
    logged = "eval"
    decides = True
    sectioned = True

    def verdict(self, data: Json) -> Verdict:
        return verdict(data["conditions"], data["tests"])

    def cautions(self, data: Json) -> list[str]:
        return [each for each in (fit_warning(data), few_documents(data)) if each is not None]

    def remarks(self, data: Json) -> list[str]:
        ancestry = ancestry_sentence(data)
        return [*self.cautions(data), *([] if ancestry is None else [ancestry])]

    def first_screen(self, data: Json) -> FirstScreen:
        return FirstScreen(
            narrow_table([(condition_name(name), data, name) for name in DECISIVE if name in data["conditions"]]),
            CONDITIONS_FIGURE,
            "Every condition with its 95 % interval",
            against(data),
        )

    def sections(self, data: Json) -> str:
        mapped, by_kind = data["conditions"]["mapped"], data["by_kind"]
        told = dict.fromkeys(c for row in by_kind.values() for c in row)
        rows = [(condition_name(c), *(percent(row.get(c)) for row in by_kind.values())) for c in told]
        controls = [name for name in CONTROLS if name in data["conditions"]]
        return fill(
            "questions",
            kept=capital(listed(_kept(mapped))),
            controls=[f"{condition_name(c).lower()} {_measure(data['conditions'][c])}" for c in controls],
            chance=data.get("chance") if mapped["accuracy"] is not None else None,
            conditions=conditions_table(data["conditions"]),
            figure=CONDITIONS_FIGURE,
            tests=_tests_table(data["tests"]),
            tables=[_further(name, table) for name, table in data["tables"].items()],
            by_kind=Table(("Condition", *by_kind), rows) if by_kind else None,
            heatmap=HEATMAP if _has_heatmap(data) else None,
            gates=_gates(data),
            checked=data["fit_check"],
        )

    def metrics(self, data: Json) -> dict[str, float]:
        return numbers_of({**data["conditions"], **data["tests"]})

    def logged_tables(self, data: Json) -> dict[str, Table]:
        rows = [(name, *(row[key] for key in LOGGED)) for name, row in data["conditions"].items()]
        return {"conditions": Table(("condition", *LOGGED), rows)}

    def swept(self, data: Json) -> dict[str, float | None]:
        conditions, mapped = data["conditions"], data["conditions"]["mapped"]
        found: dict[str, float | None] = {}
        for key in SWEPT:
            found[key] = mapped.get(key)
            if key in SWEPT_WITH_INTERVALS:
                found[f"{key}_low"], found[f"{key}_high"] = mapped.get(f"{key}_ci") or (None, None)
        for name in ("source", "ceiling"):
            found |= {f"{name}_{key}": conditions[name].get(key) for key in ("accuracy", "nats", "perplexity")}
        test = data["tests"]["mapped_vs_source"]
        return found | {f"vs_source_{key}": test.get(key) for key in ("accuracy_p", "nll_p")}

    def by_task(self, data: Json) -> dict[str, Json]:
        """All questions, and each kind of them where there are several; nothing where there are no answers."""
        if data["conditions"]["mapped"]["accuracy"] is None:
            return {}
        kinds = list(dict.fromkeys(str(item["kind"]) for item in data["items"]))
        if len(kinds) == 1:
            return {kinds[0]: data["conditions"]}
        of_kind = {kind: [item for item in data["items"] if str(item["kind"]) == kind] for kind in kinds}
        single = {kind: summarise(items)["conditions"] for kind, items in of_kind.items()}
        return {"all questions": data["conditions"], **single}

    def paired(self, data: Json) -> dict[str, list[Json]]:
        return {"": list(data["items"])}

    def evidence(self, data: Json) -> dict[str, Any]:
        """Everything but the single items and what the fit itself recorded."""
        return {key: value for key, value in data.items() if key not in ("items", "selection")}

    def terminal(self, title: str, data: Json) -> rich.table.Table:
        rows = [(condition_name(name, short=True), data, name) for name in data["conditions"]]
        return terminal_table(title, rows, [self.verdict(data).sentence, *self.remarks(data)])

    def line(self, data: Json) -> str:
        row = data["conditions"]["mapped"]
        return f"{_measures(row)}, gap recovered {percent(row['gap_recovered_nats'])} in nats"

    def figures(self, data: Json, folder: Path) -> None:
        conditions_figure(data["conditions"], folder / Path(CONDITIONS_FIGURE).name, data["chance"])
        if _has_heatmap(data):
            r2_heatmap(data["selection"], folder / Path(HEATMAP).name)

    def verdicts(self, several: Sequence[Json]) -> list[Verdict]:
        """With p corrected for how many there are."""
        tests = zip(several, _corrected(several), strict=True)
        return [verdict(data["conditions"], {"mapped_vs_source": test}) for data, test in tests]

    def beside(self, runs: Mapping[str, Json], figure: str) -> str:
        several = {label: results["data"] for label, results in runs.items()}
        rows = []
        for (label, data), test in zip(several.items(), _corrected(list(several.values())), strict=True):
            row, fitted = data["conditions"]["mapped"], runs[label]["map"]
            against = [points(test["accuracy_difference"]), p_value(test["accuracy_p"])]
            against += [number(test["nll_difference"], sign=True), p_value(test["nll_p"])]
            ratios = (percent(row[key]) for key in RATIOS if key != "retention_floor_normalised")
            name = f"{label}: {fitted['features']}, {fitted['solver']}"
            rows.append((name, percent_in(row, "accuracy"), number_in(row, "nats"), *ratios, *against))
        measures = ("Accuracy", "Nats per token", "Retention", *MEASURES[6:])
        header = ("Run", *measures, "vs source", "p (McNemar)", "vs source, nats", "p (paired t)")
        first = next(iter(several.values()))["conditions"]
        return fill(
            "questions_beside",
            count=first["mapped"]["n"],
            baselines=[f"{name} {_measures(first[name])}" for name in ("ceiling", "source")],
            runs=len(runs),
            table=Table(header, rows),
            figure=figure,
        )

    def draw_beside(self, runs: Mapping[str, Json], path: Path) -> bool:
        names = {label: f"Mapped cache, {label}: {results['map']['features']}" for label, results in runs.items()}
        beside_figure({names[label]: results["data"] for label, results in runs.items()}, path)
        return True


def narrow_table(rows: Sequence[tuple[str, Json, str]]) -> Table:
    """The conditions of some rows (name, data, condition) in a table that fits a page."""
    cells = []
    for name, data, condition in rows:
        row, test = data["conditions"][condition], data["tests"].get(f"{condition}_vs_source", {})
        label = f"**{name}**" if condition == "mapped" else name
        recovered = [_both(row, f"{base}_recovered") for base in ("gap", "context")]
        # A small p alone does not say which way.
        worse = [", worse" if each == "worse" else "" for each in outcomes(test)]
        p = [f"{p_value(test.get(key))}{way}" for key, way in zip(("accuracy_p", "nll_p"), worse, strict=True)]
        cells.append((label, percent_in(row, "accuracy"), number_in(row, "nats"), *recovered, *p))
    return Table(NARROW, cells)


def _both(row: Json, key: str) -> str:
    """A share in accuracy, if there is one, and in nats."""
    nats = percent(row.get(f"{key}_nats"))
    return nats if row.get(key) is None else f"{percent(row[key])}; nats {nats}"


def against(data: Json) -> list[str]:
    """What a reader who believes the verdict should know of the numbers behind it."""
    found = []
    test = data["tests"].get("mapped_vs_ceiling", {})
    accuracy, nats = outcomes(test)
    said = [in_accuracy(test)] if accuracy == "worse" else []
    said += [in_nats(test, " nats per token")] if nats == "worse" else []
    if said:
        found.append(f"It does not reach the target's own prefill: {'; '.join(said)}.")
    measure, sign = ("nats", -1) if data["conditions"]["mapped"]["accuracy"] is None else ("accuracy", 1)
    mapped = data["conditions"]["mapped"]
    for name in CONTROLS:
        if name in data["conditions"] and sign * (data["conditions"][name][measure] - mapped[measure]) >= 0:
            row = data["conditions"][name]
            found.append(f"The control “{condition_name(name).lower()}” does no worse: {_measure(row)}.")
    return found


def beside_figure(several: Mapping[str, Json], path: Path) -> None:
    """The mapped caches of several runs on the same items, by the names of their rows, between what they share."""
    first = next(iter(several.values()))
    rows = {name: first["conditions"][name] for name in ("ceiling", "source")}
    rows |= {f"mapped {name}": data["conditions"]["mapped"] for name, data in several.items()}
    rows |= {name: first["conditions"][name] for name in ("floor", "raw_copy", "no_context")}
    conditions_figure(rows, path, first["chance"], {f"mapped {name}": name for name in several})


def conditions_table(conditions: Mapping[str, Json]) -> Table:
    """The headline table: one row per condition."""
    return Table(("Condition", *MEASURES), [(condition_name(name), *numbers(row)) for name, row in conditions.items()])


def numbers(row: Json) -> tuple[str, ...]:
    """One condition's cells, in the order of the headline table."""
    return (
        percent_in(row, "accuracy"),
        percent(row.get("generated")),
        perplexity(row["perplexity"]),
        number_in(row, "nats"),
        *(percent(row.get(key)) for key in RATIOS),
    )


def _measure(row: Json) -> str:
    return f"{number(row['nats'])} nats" if row["accuracy"] is None else percent(row["accuracy"])


def _measures(row: Json) -> str:
    right = "" if row["accuracy"] is None else f"{percent(row['accuracy'])} right, "
    return f"{right}{number(row['nats'])} nats per token"


def _kept(mapped: Json) -> list[str]:
    """What of the ceiling is kept, in phrases."""
    phrases = dict(KEPT)
    if mapped.get("gap_recovered") is None:
        phrases = {"gap_recovered_nats": "{} of the gap in nats is recovered"}
        phrases["context_recovered_nats"] = "{} of what the context is worth to the target arrives"
    else:
        phrases |= {f"{base}_recovered_nats": f"{{}} of {what} in nats" for base, what in IN_NATS.items()}
    return [text.format(percent_in(mapped, key)) for key, text in phrases.items() if mapped.get(key) is not None]


def _tests_table(tests: Mapping[str, Json]) -> Table:
    rows = []
    for key, test in tests.items():
        first, _, second = key.partition("_vs_")
        name = " vs ".join(condition_name(each, short=True) for each in (first, second))
        sign = f"{p_value(test['nll_sign_p'])} ({percent(test['nll_above'])})"
        cells = (*difference(test, "accuracy", share=True), *difference(test, "nll", share=False), sign)
        rows.append((name, *cells, test["n"], test["documents"]))
    header = ("Comparison", "Accuracy", "95 %", "p (McNemar)", "Nats per token", "95 %", "p (paired t)")
    return Table((*header, "p (sign; higher in)", "Items", "Documents"), rows)


def _further(name: str, table: Json) -> dict[str, Any]:
    title, note = FURTHER.get(name, (capital(name.replace("_", " ")), ""))
    tests = _tests_table(table["tests"]) if table["tests"] else ""
    return {"title": title, "note": note, "conditions": conditions_table(table["conditions"]), "tests": tests}


def _gates(data: Json) -> Table | None:
    """The gates, and the check of the fit where it was made."""
    rows = [(gate["name"], _small(gate["value"]), _small(gate["tolerance"]), gate["passed"]) for gate in data["gates"]]
    if rows and (check := data["fit_check"]):
        for name, value, key in (
            ("largest", check["worst"]["ratio"], "tolerated"),
            ("mean", check["mean"], "tolerated_mean"),
        ):
            within = value is not None and value <= check[key]
            rows.append((f"fit: {name} ratio of unexplained variance", number(value, 2), setting(check[key]), within))
    said = [(*cells, "passed" if passed else "**failed**") for *cells, passed in rows]
    return Table(("Gate", "Value", "Tolerance", "Result"), said) if rows else None


def _small(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value else setting(value)


def _has_heatmap(data: Json) -> bool:
    selection = data["selection"] or {}
    return bool(selection.get("r2_keys") and selection.get("r2_values"))


def _corrected(several: Sequence[Json]) -> list[dict[str, Any]]:
    """Every run's test against the source, with p corrected for the number of runs."""
    tests = [dict(data["tests"]["mapped_vs_source"]) for data in several]
    for key in ("accuracy_p", "nll_p"):
        known = [test for test in tests if test[key] is not None]
        for test, p in zip(known, holm([test[key] for test in known]), strict=True):
            test[key] = p
    return tests


TERMINAL = (
    *("\nCondition", "Accuracy\n% [95 %]", "Perp-\nlexity", "\nNats"),
    *("Gap\nrecov.", "Context\nrecov.", "p\nacc.", "p\nnats"),
)


def terminal_table(title: str, rows: Sequence[tuple[str, Json, str]], caption: Sequence[str]) -> rich.table.Table:
    """The headline table for a console of 80 columns.

    Args:
        rows: each one's label, the data that it is of, and its condition; p is against the source, green where the
            condition is better, red where it is worse.
        caption: what stands below the table, a line each.
    """
    in_accuracy = rows[0][1]["conditions"]["mapped"]["accuracy"] is not None
    styles: dict[tuple[int, int], str] = {}
    for place, (_, data, condition) in enumerate(rows):
        test = data["tests"].get(f"{condition}_vs_source", {})
        bold = "bold" if condition == "mapped" else ""
        styles |= {(place, n): bold for n in range(len(TERMINAL))}
        for n, outcome in enumerate(outcomes(test), len(TERMINAL) - 2):
            styles[place, n] = f"{bold} {STYLES.get(outcome or '', '')}".strip()
    cells = [(label, *_cells(data, condition, in_accuracy)) for label, data, condition in rows]
    whole = range(1, len(TERMINAL))
    said = "\n".join((*caption, "p: against the source alone."))
    return Table(TERMINAL, cells, whole=whole, styles=styles).terminal(title, said, tight=True)


def _cells(data: Json, condition: str, in_accuracy: bool) -> list[str]:
    """A row under TERMINAL: without accuracy the nats take its place, so that a row fits 80 characters."""
    row, test = data["conditions"][condition], data["tests"].get(f"{condition}_vs_source", {})
    accuracy = percent_in(row, "accuracy").replace(" %", "", 1)
    cells = [accuracy, perplexity(row["perplexity"]), "" if in_accuracy else number(row["nats"])]
    unit = "" if in_accuracy else "_nats"
    cells += [percent(row[f"{base}_recovered{unit}"]) for base in ("gap", "context")]
    return cells + [p_value(test[key]) if key in test else "" for key in ("accuracy_p", "nll_p")]
