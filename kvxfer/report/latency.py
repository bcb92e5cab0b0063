"""The whole cost of a handoff (``latency``): does it save time, from which length on, and where does it go?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kvxfer.report.figures import COLOURS, INK, MUTED, canvas, label, tidy
from kvxfer.report.kind_report import FirstScreen, Json, KindReport
from kvxfer.report.numbers import NOTHING, number, percent, quantity
from kvxfer.report.prose import capital, fill, listed
from kvxfer.report.table import Table
from kvxfer.report.verdict import Kind, Verdict

NAMES = {
    "export": "Export",
    "exact": "Exact first tokens",
    "map": "Map",
    "inject": "Inject",
    "held_back": "Held-back prefill",
    "first_decode": "First decode",
}
"""The steps of a handoff, in the order in which they happen."""

WAYS = {
    "warm": "the source has run and the map is in memory",
    "loaded": "the source has run and the map is loaded from disk and verified first",
    "cold": "the source has to run as well (both prefills are counted), the map is in memory",
}
# From the map's blues to the target's own greys, in the order in which they happen.
PARTS = {
    "export": "#0b3c66",
    "exact": "#3d8f7a",
    "map": COLOURS["mapped"],
    "inject": "#7fbfae",
    "held_back": "#b7dcd2",
    "first_decode": "#e3c878",
}
FIGURE = "latency_parts.png"
NARROW = 0.36
MOST_BATCHES = 3


class LatencyReport(KindReport):
    """At which lengths a handoff saves time, once the source has run and from nothing."""

    heading = "The whole cost of a handoff"
    logged = "eval/latency"
    against_source = False

    def verdict(self, data: Json) -> Verdict:
        """For the smallest batch: at which lengths the handoff saves time once the source has run, and from nothing."""
        batch = min(point["batch"] for point in data["points"])
        points = [point for point in data["points"] if point["batch"] == batch]
        warm = [outcome(point["warm"]) for point in points]
        kinds: dict[int, Kind] = {1: "beats", 0: "none", -1: "worse"}
        kind = kinds[warm[0]] if len(set(warm)) == 1 else "mixed"
        heads = {
            "beats": "The handoff saves time",
            "worse": "The handoff costs more time than it saves",
            "none": "It is not shown that the handoff saves time",
            "mixed": "The handoff saves time at some lengths only",
        }
        said = f"{heads[kind]}. Once the source has run, it {_where(points, 'warm')}; "
        said += f"with the source's prefill counted too (cold), it {_where(points, 'cold')}"
        end = f" (batches of {batch})" if batch > 1 else ""
        return Verdict(kind, heads[kind], f"{said}{end}.{_caution(data)}")

    def first_screen(self, data: Json) -> FirstScreen:
        headings = ("Tokens", "Batch", "Target prefill (ms)", "Handoff (ms)", "Saved (ms) [95 %]", "Warm", "Cold")
        slow = {
            "once the source has run": [p for p in data["points"] if outcome(p["warm"]) < 1],
            "with the source's prefill counted too": [p for p in data["points"] if outcome(p["cold"]) < 1],
        }
        against = [f"No time is shown to be saved {when} {_at(found)}." for when, found in slow.items() if found]
        caption = "The parts of a handoff against the target's own prefill"
        return FirstScreen(_times_table(data).only(*headings), f"figures/{FIGURE}", caption, against)

    def sections(self, data: Json) -> str:
        load, last = data["load"], data["points"][-1]["roofs"]
        checks = [point for point in data["points"] if point["whole"] is not None]
        most = max(checks, key=lambda point: abs(_of_parts(point) - 1), default=None)
        return fill(
            "latency",
            data=data,
            slices=slices(data) if data["scaled"] else "",
            times=_times_table(data),
            load=milliseconds(load["median"]),
            outside=any(point["vllm"] is not None for point in data["points"]),
            break_even=_break_even(data),
            parts=_parts_table(data),
            unclocked=None if most is None else {"share": _of_parts(most), "length": most["length"]},
            formula=_formula_table(data),
            shared=load["bytes"] / data["settings"]["handoffs_per_fit"],
            roofs=_roofs_table(data),
            ceiling=last["target"]["flops"] / last["map"]["flops"],
            own_fraction=last["map"]["fraction_of_own"],
        )

    def metrics(self, data: Json) -> dict[str, float]:
        found: dict[str, float] = {"load_seconds": data["load"]["median"]}
        for point in data["points"]:
            at = f"{point['length']}/{point['batch']}"
            for name in ("handoff", "source", "target"):
                found[f"{at}/{name}_seconds"] = point[name]["median"]
            for name in ("warm", "loaded", "cold"):
                found[f"{at}/{name}_ratio"] = point[name]["ratio"]
            found |= {f"{at}/{name}_seconds": part["median"] for name, part in point["parts"].items()}
            found |= {f"{at}/{name}_fraction_of_roof": roof["fraction"] for name, roof in point["roofs"].items()}
        return found

    def evidence(self, data: Json) -> dict[str, Any]:
        """From which length on a handoff pays, and on which machine: what a policy may ask for."""
        return {key: data[key] for key in ("machine", "break_even")}

    def figures(self, data: Json, folder: Path) -> None:
        """Stacked parts of the handoff (left bar of each length) and the target's own prefill (right), as shares of it.

        The source's prefill stands in outline on top of the handoff: what counts besides when nothing has run yet. One
        panel per batch size, the smallest three.
        """
        batches = sorted({point["batch"] for point in data["points"]})[:MOST_BATCHES]
        panels = {batch: [point for point in data["points"] if point["batch"] == batch] for batch in batches}
        most = max(len(points) for points in panels.values())
        width = max(1.45 * most, 3.6) * len(panels) + 2.1
        with canvas(folder / FIGURE, (min(width, 16.0), 4.3)) as figure:
            all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
            for axes, (batch, points) in zip(all_axes, panels.items(), strict=True):
                _panel(axes, points)
                if len(panels) > 1:
                    axes.set_title(f"batches of {batch}", loc="left", fontweight="bold")
            all_axes[0].set_ylabel("share of the target's own prefill")
            handles, labels = all_axes[0].get_legend_handles_labels()
            # From top to bottom as they are stacked.
            figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
            notes = [text for text, told in (("random weights", data["random"]), ("scaled", data["scaled"])) if told]
            below = "tokens of the prompt, and the target's own prefill" + (f"  ({', '.join(notes)})" if notes else "")
            figure.supxlabel(below, fontsize=9, color=MUTED)


def outcome(row: Json) -> int:
    """1 where a comparison shows that time is saved, -1 that it is lost, 0 neither."""
    if row["ci"] is None:
        return 0
    return int(row["ci"][0] > 0) - int(row["ci"][1] < 0)


def _where(points: Sequence[Json], way: str) -> str:
    """At which lengths a way reaches the first token sooner, and at which it does not."""
    by = {n: [point for point in points if outcome(point[way]) == n] for n in (1, 0, -1)}
    words = {
        1: "reaches the target's first token {} times as fast as the target's prefill",
        -1: "takes {} times as long",
        0: "shows no difference",
    }
    parts = []
    for n, said in words.items():
        ratios = [1 / point[way]["ratio"] if n < 0 else point[way]["ratio"] for point in by[n]]
        ends = [number(end(ratios), 2) for end in (min, max) if ratios]
        parts += [f"{said.format(' to '.join(dict.fromkeys(ends)))} {_at(by[n])}"] if ratios else []
    return listed(parts)


def _at(points: Sequence[Json]) -> str:
    return f"at {listed([point['length'] for point in points])} tokens"


def _caution(data: Json) -> str:
    """What the times are not: of trained weights, of whole models."""
    parts = ["weights are random, so this is about time alone"] if data["random"] else []
    parts += [f"times are scaled from {slices(data)}"] if data["scaled"] else []
    return f" {capital('; '.join(parts))}." if parts else ""


def slices(data: Json) -> str:
    """What of the models was timed."""
    return " and ".join(f"{timed} of the {side}'s {whole} layers" for side, (timed, whole) in data["scaled"].items())


def milliseconds(seconds: float | None, sign: bool = False) -> str:
    """Three significant digits, in milliseconds without the unit."""
    if seconds is None:
        return NOTHING
    value = 1e3 * seconds
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return number(value, decimals, sign)


def _times_table(data: Json) -> Table:
    return Table.of(
        data["points"],
        *_ASKED,
        ("Target prefill (ms)", lambda p: milliseconds(p["target"]["median"])),
        ("Handoff (ms)", lambda p: milliseconds(p["handoff"]["median"])),
        ("Saved (ms) [95 %]", _saved),
        ("Warm", lambda p: _times_as_fast(p["warm"]["ratio"])),
        ("+ map load", lambda p: _times_as_fast(p["loaded"]["ratio"])),
        ("Source prefill", lambda p: milliseconds(p["source"]["median"])),
        ("Cold", lambda p: _times_as_fast(p["cold"]["ratio"])),
        ("vLLM prefill", lambda p: milliseconds(p["vllm"])),
        ("against vLLM", lambda p: (p["vllm"] and _times_as_fast(p["vllm"] / p["handoff"]["median"])) or NOTHING),
    )


_ASKED = (("Tokens", itemgetter("length")), ("Batch", itemgetter("batch")))


def _saved(point: Json) -> str:
    ci = point["warm"]["ci"]
    between = "" if ci is None else f" [{', '.join(milliseconds(value) for value in ci)}]"
    return milliseconds(point["warm"]["saving"], sign=True) + between


def _times_as_fast(ratio: float) -> str:
    return f"{number(ratio, 2)}×"


def _break_even(data: Json) -> list[str]:
    """From which length each way pays, in a phrase."""
    said, shortest = [], min(point["length"] for point in data["points"])
    for row in data["break_even"]:
        for way, text in WAYS.items():
            length, where = row[way], f"none up to {row['up_to']} tokens"
            if length is not None:
                where = f"{length:.0f} tokens" if length > shortest else f"{shortest} tokens or fewer"
            batch = f", batches of {row['batch']}" if len(data["break_even"]) > 1 else ""
            said.append(f"{where}, where {text}{batch}")
    return said


def _of_parts(point: Json) -> float:
    """What the handoff took without a clock between its parts, as a share of their sum."""
    return float(point["whole"]["median"] / point["handoff"]["median"])


def _parts_table(data: Json) -> Table:
    def cell(point: Json, step: str) -> str:
        middle, low, high = (milliseconds(point["parts"][step][key]) for key in ("median", "low", "high"))
        return f"{middle} [{low}, {high}]"

    used = [step for step in NAMES if any(point["parts"][step]["median"] > 1e-6 for point in data["points"])]
    return Table.of(data["points"], *_ASKED, *((NAMES[step], partial(cell, step=step)) for step in used))


def _formula_table(data: Json) -> Table:
    terms = {"Target prefill": "prefill", "− mapping": "mapping", "− transport": "transport", "− delivery": "delivery"}
    terms |= {"− own tokens": "own", "− load": "load", "− fallback": "fallback", "= saving": "saving"}
    terms["Per accepted"] = "per_accepted"
    return Table.of(
        [{**point, **row} for point in data["points"] for row in point["savings"]],
        *_ASKED,
        ("Accepted", lambda row: f"{100 * row['acceptance']:.0f} %"),
        *((heading, lambda row, key=key: milliseconds(row[key])) for heading, key in terms.items()),
    )


def _roofs_table(data: Json) -> Table:
    names = {"map": "Mapping", "target": "Target prefill", "source": "Source prefill"}
    return Table.of(
        [{**p, **roof, "name": names[name]} for p in data["points"] for name, roof in p["roofs"].items()],
        *_ASKED,
        ("What", itemgetter("name")),
        ("FLOPs", lambda row: quantity(row["flops"])),
        ("Bytes", lambda row: quantity(row["bytes"], "B")),
        ("Roof (ms)", lambda row: milliseconds(row["roof"])),
        ("Bound by", itemgetter("bound")),
        ("Measured (ms)", lambda row: milliseconds(row["measured"])),
        ("Of the roof", lambda row: percent(row["fraction"])),
    )


def _panel(axes: Axes, points: Sequence[Json]) -> None:
    places = range(len(points))
    prefill = [point["target"]["median"] for point in points]
    left = [place - NARROW / 2 - 0.02 for place in places]
    right = [place + NARROW / 2 + 0.02 for place in places]
    below = [0.0] * len(points)
    for step, colour in PARTS.items():
        seconds = [point["parts"][step]["median"] + (point["wire"] if step == "export" else 0) for point in points]
        shares = [each / whole for each, whole in zip(seconds, prefill, strict=True)]
        if max(shares) > 0.002:
            axes.bar(left, shares, NARROW, bottom=below, color=colour, label=NAMES[step], zorder=2)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    source = [point["source"]["median"] / whole for point, whole in zip(points, prefill, strict=True)]
    look: dict[str, Any] = {
        "facecolor": "none",
        "edgecolor": COLOURS["source"],
        "linewidth": 1.2,
        "hatch": "////",
        "zorder": 2,
    }
    axes.bar(left, source, NARROW, bottom=below, label="Source's prefill (cold)", **look)
    axes.bar(right, [1.0] * len(points), NARROW, color=COLOURS["ceiling"], label="Target's own prefill", zorder=2)
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    for place, height in zip(left, below, strict=True):
        label(axes, f"{100 * height:.0f} %", (place, height), (0, 2), pad=0.6, ha="center")
    names = [f"{point['length']}\n{milliseconds(point['target']['median'])} ms" for point in points]
    axes.set_xticks(places, names)
    highest = max([1.0, *(a + b for a, b in zip(below, source, strict=True))])
    axes.set_ylim(0, 1.1 * highest)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    tidy(axes)
