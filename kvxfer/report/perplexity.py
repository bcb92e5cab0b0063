"""Perplexity of text that follows a prefix (``perplexity``): levels at every length, and what lengths change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kvxfer.evals.statistics import gap_recovered_nats, outcome
from kvxfer.report.figures import COLOURS, DOMAIN_COLOURS, INK, MUTED, canvas, label, name_line, tidy
from kvxfer.report.kind_report import FirstScreen, Json, KindReport
from kvxfer.report.numbers import NOTHING, difference, interval, number, p_text, p_value, percent, perplexity
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import Verdict, verdict

LEVELS = ("ceiling", "source", "mapped", "no_context", "raw_copy", "floor")
FIGURE = "perplexity_lengths.png"
LOWEST, HIGHEST = -1.0, 1.5
"""Shares of the gap beyond are drawn there: where there is hardly a gap, a ratio may be anything."""

LOG_FROM = 8.0
"""Perplexities that far apart are drawn on a logarithmic axis."""


class PerplexityReport(KindReport):
    """Does the map beat the source, and does it hold at prefixes longer than the rows it was calibrated on?"""

    heading = "Perplexity after a prefix"
    logged = "eval/perplexity"

    def verdict(self, data: Json) -> Verdict:
        """At the longest prefix of the run's own text that has a gap to close: against the source; then the lengths."""
        own = data["domains"][0]
        points = by_length(data["points"], own["domain"])
        able = [length["prefix"] for length in own["lengths"] if length["has_gap"]]
        at = able[-1] if able else max(points)
        said = verdict(
            points[at]["conditions"], points[at]["tests"], subject=f"The mapped cache of {at} tokens of {own['domain']}"
        )
        return said.reworded({}, length_sentence(own, points))

    def first_screen(self, data: Json) -> FirstScreen:
        headings = ("Text", "Prefix", "Source", "Mapped", "Gap recovered (nats)", "Context recovered (nats)", "p")
        against = [
            f"{d['domain']}: {length_sentence(d, by_length(data['points'], d['domain']))}"
            for d in data["domains"]
            if (change := d["lengths"][-1].get("change")) and shown(change["loss"]) > 0
        ]
        caption = "Gap recovered and perplexity against the prefix's length"
        return FirstScreen(_levels_table(data).only(*headings), f"figures/{FIGURE}", caption, against)

    def sections(self, data: Json) -> str:
        remarks = [
            f"{domain['domain']}: {said}"
            for domain in data["domains"]
            if (said := length_sentence(domain, by_length(data["points"], domain["domain"])))
        ]
        lengthened = [domain["lengthened"] for domain in data["domains"]]
        return fill(
            "perplexity",
            **data,
            counts=[f"{d['domain']}: {d['rows']} rows of {d['documents']} documents" for d in data["domains"]],
            of_text=not all(lengthened),
            of_toy=any(lengthened),
            levels=_levels_table(data),
            changes=_changes_table(data),
            figure=f"figures/{FIGURE}",
            remarks=[*remarks, *data["notes"]],
        )

    def metrics(self, data: Json) -> dict[str, float]:
        found = {
            f"{point['domain']}/{point['prefix']}/{name}/nats": row["nats"]
            for point in data["points"]
            for name, row in point["conditions"].items()
        }
        for domain in data["domains"]:
            last = domain["lengths"][-1].get("change")
            for name, test in (last or {}).items():
                if test["difference"] is not None:
                    found[f"{domain['domain']}/change/{name}"] = test["difference"]
        return found

    def figures(self, data: Json, folder: Path) -> None:
        """Gap recovered (left) and perplexity (right) against the prefix's length, with 95 % intervals, as PNG."""
        with canvas(folder / FIGURE, (9.6, 3.9)) as figure:
            left, right = figure.subplots(1, 2)
            for n, domain in enumerate(data["domains"]):
                colour = DOMAIN_COLOURS[n % len(DOMAIN_COLOURS)]
                points = by_length(data["points"], domain["domain"])
                _shares(left, points, colour, domain["domain"])
                _levels(right, points, colour, named=n == 0)
            left.axhline(0, color=COLOURS["source"], linewidth=1.3, linestyle=(0, (5, 3)))
            left.axhline(1, color=COLOURS["ceiling"], linewidth=1.1, linestyle=":")
            for y, text, colour in ((0.0, "source alone", COLOURS["source"]), (1.0, "ceiling", COLOURS["ceiling"])):
                look: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8.5, "color": colour}
                label(left, text, (1.0, y), (-2, 2), ("axes fraction", "data"), **look)
            left.set_ylabel("gap recovered (nats)")
            left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %".replace("-", "\N{MINUS SIGN}"))
            low, high = left.get_ylim()
            left.set_ylim(max(low, LOWEST - 0.1), min(high, HIGHEST + 0.1))
            right.set_ylabel("perplexity (lower is better)")
            low, high = right.dataLim.intervaly
            if low > 0 and high / low > LOG_FROM:
                right.set_yscale("log")
                right.yaxis.set_major_formatter("{x:g}")
            lengths = sorted({point["prefix"] for point in data["points"]})
            for axes, loc, columns in ((left, "outside lower left", 5), (right, "outside lower right", 3)):
                _axis(axes, lengths, data["calibrated_length"])
                figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=columns, loc=loc)


def by_length(points: Sequence[Json], domain: str) -> dict[int, Json]:
    """One domain's points by their prefix."""
    return {point["prefix"]: point for point in points if point["domain"] == domain}


def shown(test: Json) -> float:
    """The difference where it is shown (p below 0.05, interval without zero), else 0."""
    if test["p"] is None:
        return 0.0
    ci = (test["ci_low"], test["ci_high"])
    return 0.0 if outcome(test["p"], test["difference"], ci, higher_is_better=True) == "none" else test["difference"]


def described(test: Json, share: bool = False) -> str:
    """A difference with its interval and p."""
    if test["difference"] is None:
        return "no ratio: the gap vanishes in some resamples"
    value, ci, _ = _cells(test, share)
    return f"{value}, 95 % interval {ci}, {p_text(test['p'])}"


def recovered(point: Json) -> float | None:
    """The gap that the mapped cache recovers at one length, in nats."""
    nats = [point["conditions"][condition]["nats"] for condition in ("mapped", "source", "ceiling")]
    return gap_recovered_nats(*nats)


def length_sentence(domain: Json, points_by_length: Mapping[int, Json]) -> str:
    """Whether the map holds from the reference length to the longest one, in a domain's own numbers."""
    start, last = domain["reference"], domain["lengths"][-1]
    end = last["prefix"]
    if end == start:
        return ""
    if not last["has_gap"]:
        return (
            f"After {end} tokens the target itself is not shown to beat the source, so whether the map holds there "
            "cannot be tested."
        )
    calibrated = "the calibrated " if domain["reference_is_calibrated"] else ""
    found = last["change"]
    what = {1: "grows", -1: "shrinks"}.get(int(np.sign(shown(found["loss"]))))
    says = (
        f"what it loses against the ceiling {what}"
        if what
        else "no change of what it loses against the ceiling is shown"
    )
    shares = " to ".join(percent(recovered(points_by_length[length])) for length in (start, end))
    text = (
        f"From {calibrated}{start} tokens to {end}, {says} ({described(found['loss'])}, nats per token), and the gap "
        f"recovered goes from {shares} ({described(found['gap_recovered'], share=True)})."
    )
    if shown(found["ceiling"]) > 0:
        text += (
            f" The target itself gets worse there ({described(found['ceiling'])}): that length tests the target as "
            "much as the map."
        )
    return text


def _levels_table(data: Json) -> Table:
    """Perplexity of every condition, and the map against the source, by domain and length."""
    header = ["Text", "Prefix", "Ceiling", "Source", "Mapped", "No context", "Raw copy", "Zeroed"]
    header += (
        "Gap recovered (nats)",
        "95 % interval",
        "Context recovered (nats)",
        "Mapped \N{MINUS SIGN} source",
        "95 % interval",
        "p",
    )
    rows = []
    for point in data["points"]:
        mapped = point["conditions"]["mapped"]
        share = (percent(mapped["gap_recovered_nats"]), interval(mapped["gap_recovered_nats_ci"]))
        context = percent(mapped["context_recovered_nats"])
        against = difference(point["tests"]["mapped_vs_source"], "nll", share=False)
        levels = (perplexity(point["conditions"][name]["perplexity"]) for name in LEVELS)
        rows.append((point["domain"], str(point["prefix"]), *levels, *share, context, *against))
    return Table(header, rows)


def _changes_table(data: Json) -> Table | None:
    """What each length changes against the reference length; nothing where there is one length only."""
    header = ["Text", "From", "To", "Ceiling", "95 % interval", "p", "Loss against the ceiling", "95 % interval", "p"]
    header += ("Gap recovered", "95 % interval", "p", "Source worse than ceiling by", "p")
    rows = []
    for domain in data["domains"]:
        for length in domain["lengths"]:
            if "change" not in length:
                continue
            cells = [domain["domain"], str(domain["reference"]), str(length["prefix"])]
            for name in ("ceiling", "loss", "gap_recovered"):
                cells += _cells(length["change"][name], share=name == "gap_recovered")
            gap = length["gap"]
            rows.append((*cells, number(gap["difference"], sign=True), p_value(gap["p"])))
    return Table(header, rows) if rows else None


def _cells(test: Json, share: bool) -> tuple[str, str, str]:
    if test["difference"] is None:
        return NOTHING, NOTHING, NOTHING
    found = {"of_difference": test["difference"], "of_ci": (test["ci_low"], test["ci_high"]), "of_p": test["p"]}
    return difference(found, "of", share)


def _shares(axes: Axes, points: Mapping[int, Json], colour: str, name: str) -> None:
    found = {length: recovered(point) for length, point in points.items()}
    kept = [length for length, share in found.items() if share is not None]
    values = np.clip([found[length] for length in kept], LOWEST, HIGHEST)
    axes.plot(kept, values, color=colour, linewidth=2, marker="o", markersize=6, label=name)
    for length, value in zip(kept, values, strict=True):
        ci = points[length]["conditions"]["mapped"]["gap_recovered_nats_ci"]
        if ci is None:
            # A gap whose sign is not sure: a share of it says little.
            axes.plot(length, value, marker="o", markersize=6, color=colour, markerfacecolor="white", zorder=4)
        else:
            axes.plot([length, length], np.clip(ci, LOWEST, HIGHEST), color=colour, linewidth=2.2, alpha=0.45)


def _levels(axes: Axes, points: Mapping[int, Json], colour: str, named: bool) -> None:
    """The mapped cache with its interval, the source dashed and the ceiling dotted."""
    lengths = list(points)
    looks: dict[str, dict[str, Any]] = {
        "mapped": {"marker": "o", "linewidth": 2},
        "source": {"linestyle": (0, (5, 3)), "linewidth": 1.4},
        "ceiling": {"linestyle": ":", "linewidth": 1.6},
    }
    for condition, look in looks.items():
        rows = [points[length]["conditions"][condition] for length in lengths]
        values = [np.nan if row["perplexity"] is None else row["perplexity"] for row in rows]
        axes.plot(lengths, values, color=colour, label=condition if named else None, **look)
        if condition == "mapped":
            for length, row in zip(lengths, rows, strict=True):
                if row["perplexity"] is not None:
                    axes.plot([length] * 2, np.exp(row["nats_ci"]), color=colour, linewidth=2.2, alpha=0.45)


def _axis(axes: Axes, lengths: list[int], calibrated: int | None) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / math.sqrt(2), lengths[-1] * math.sqrt(2))
    axes.set_xlabel("prefix, tokens")
    if calibrated is not None and axes.get_xlim()[0] <= calibrated <= axes.get_xlim()[1]:
        axes.axvline(calibrated, color=MUTED, linewidth=1.1, linestyle="-", alpha=0.5, zorder=0)
        name_line(axes, calibrated, "calibrated", MUTED)
    tidy(axes, keep=("left", "bottom"))
    axes.tick_params(colors=INK)
