"""A conversation that changes models at every turn (``multiturn``): does what is lost add up?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvxfer.evals.statistics import paired_item
from kvxfer.report.figures import COLOURS, Panel, Series, series_figure
from kvxfer.report.kind_report import FirstScreen, Json, KindReport
from kvxfer.report.numbers import difference, interval, number, p_text, percent, points
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import Verdict, verdict

NAMES = {"up": "Up: small to large", "down": "Down: large to small", "ping_pong": "Ping-pong"}
DRIFT = "multiturn_drift.png"
_IN_NATS = ("Nats", "Ceiling", "Small alone", "Drift (nats)", "p")
HANDED = {"up": "up", "down": "down", "ping_pong": "to and fro"}


class MultiturnReport(KindReport):
    """At every turn the drift of the answering model from its own prefill, by pattern."""

    heading = "Many turns"
    logged = "eval/multiturn"

    def verdict(self, data: Json) -> Verdict:
        """The first pattern (up, unless it was left out), all turns together, against the small model alone."""
        pattern, found = next(iter(data["patterns"].items()))
        pooled = found["pooled"]
        subject = f"The cache handed {HANDED[pattern]} over {data['turns']} turns"
        said = verdict(pooled["conditions"], pooled["tests"], subject=subject)
        # What is called the source elsewhere is the sender of one direction only.
        return said.reworded({"the source": "the small model alone"}, _drift_sentence(found))

    def first_screen(self, data: Json) -> FirstScreen:
        tables = {pattern: _table(found, data["answers"]) for pattern, found in data["patterns"].items()}
        rows = [(NAMES[pattern], *table.rows[-1][1:]) for pattern, table in tables.items()]
        columns = ("Pattern", *next(iter(tables.values())).columns[1:])
        shown = ("Mapped", "Ceiling", "Small alone", "Drift", "p") if data["answers"] else _IN_NATS
        against = [
            f"{NAMES[pattern]}: {_drift_sentence(found)}"
            for pattern, found in data["patterns"].items()
            if found["slope_nats"] is not None and "The drift grows" in _drift_sentence(found)
        ]
        table = Table(columns, rows).only("Pattern", *shown)
        return FirstScreen(table, f"figures/{DRIFT}", "Drift from the answering model's own prefill by turn", against)

    def sections(self, data: Json) -> str:
        patterns = [
            {"name": NAMES[pattern], "drift": _drift_sentence(found), "table": _table(found, data["answers"])}
            for pattern, found in data["patterns"].items()
        ]
        return fill("multiturn", **{**data, "patterns": patterns})

    def metrics(self, data: Json) -> dict[str, float]:
        flat: dict[str, float] = {}
        for pattern, found in data["patterns"].items():
            for row in found["turns"]:
                flat[f"{pattern}/{row['turn']}/drift_nats"] = row["tests"]["mapped_vs_ceiling"]["nll_difference"]
                if data["answers"]:
                    flat[f"{pattern}/{row['turn']}/accuracy"] = row["conditions"]["mapped"]["accuracy"]
            flat[f"{pattern}/drift_nats"] = found["pooled"]["tests"]["mapped_vs_ceiling"]["nll_difference"]
            if found["slope_nats"] is not None:
                flat[f"{pattern}/slope_nats"] = found["slope_nats"]["difference"]
        return flat

    def paired(self, data: Json) -> dict[str, list[Json]]:
        return {
            NAMES[pattern]: [
                paired_item(i, i["nats"][pattern], i.get("correct", {}).get(pattern), tokens=i["tokens"])
                for i in data["items"]
            ]
            for pattern in data["patterns"]
        }

    def figures(self, data: Json, folder: Path) -> None:
        measures = [("accuracy", "accuracy against the ceiling (pp)", 100.0)] if data["answers"] else []
        measures.append(("nll", "nats per token against the ceiling", 1.0))
        panels = []
        for key, label, scale in measures:
            lines = []
            for pattern, found in data["patterns"].items():
                tests = [(row["turn"], row["tests"]["mapped_vs_ceiling"]) for row in found["turns"]]
                values = [scale * test[f"{key}_difference"] for _, test in tests]
                ends = [[scale * end for end in test[f"{key}_ci"]] for _, test in tests]
                lines.append(Series(NAMES[pattern], [turn for turn, _ in tests], values, ends))
            if "up" in data["patterns"]:
                lines.append(_gap(data["patterns"]["up"]["turns"], "nats" if key == "nll" else key, scale))
            panels.append(Panel(label, "turn", lines, zero="ceiling"))
        series_figure(panels, folder / DRIFT)


def _gap(turns: Sequence[Json], key: str, scale: float) -> Series:
    """What there is to lose: the small model alone, less the large one's own prefill."""
    values = [scale * (row["conditions"]["source"][key] - row["conditions"]["ceiling"][key]) for row in turns]
    places = [row["turn"] for row in turns]
    return Series(
        "Small alone, against the large", places, values, [None] * len(values), COLOURS["identity"], dashed=True
    )


def _drift_sentence(found: Json) -> str:
    """Over all turns, and whether it grows."""
    test = found["pooled"]["tests"]["mapped_vs_ceiling"]
    parts = [
        f"{number(test['nll_difference'], sign=True)} nats per token {interval(test['nll_ci'], 'number')}, "
        f"{p_text(test['nll_p'])}"
    ]
    if test["accuracy_p"] is not None:
        said = f"{points(test['accuracy_difference'])} {interval(test['accuracy_ci'])}, {p_text(test['accuracy_p'])}"
        parts.insert(0, f"{said} in accuracy")
    slope = found["slope_nats"]
    if slope is None:
        return f"Against the ceiling: {' and '.join(parts)}."
    low, high, p = slope["ci_low"], slope["ci_high"], slope["t_p"]
    known = p < 0.05 and not low <= 0 <= high
    grows = ("grows" if slope["difference"] > 0 else "shrinks") if known else "is not shown to grow or shrink"
    by = f"{number(slope['difference'], 4, sign=True)} nats per token each turn [{number(low, 4)}, {number(high, 4)}]"
    return f"Against the ceiling: {' and '.join(parts)}. The drift {grows} with the turns ({by}, paired t {p_text(p)})."


def _table(found: Json, answers: bool) -> Table:
    """A row per turn, and one of all."""
    accuracy = ("Mapped", "Ceiling", "Small alone", "Drift", "95 %", "p") if answers else ()
    nats = ("Nats", "Ceiling", "Small alone", "Drift (nats)", "95 %", "p")
    rows = []
    for row in (*found["turns"], {"turn": "all", **found["pooled"]}):
        test = row["tests"]["mapped_vs_ceiling"]
        share = percent(row["mapped"] / row["tokens"]) if row.get("tokens") else ""
        cells = [str(row["turn"]), str(row.get("answering", "")), str(row.get("hops", "")), share]
        conditions = [row["conditions"][name] for name in ("mapped", "ceiling", "source")]
        if answers:
            cells += [*(percent(c["accuracy"]) for c in conditions), *difference(test, "accuracy", share=True)]
        rows.append([*cells, *(number(c["nats"]) for c in conditions), *difference(test, "nll", share=False)])
    return Table(("Turn", "Answers", "Hops", "Mapped tokens", *accuracy, *nats), rows)
