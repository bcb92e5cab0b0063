"""Five findings of the public study of cache maps, put to the test on every pair: a verdict for each, from the JSON.

Where a finding says that something makes no difference, ``confirmed`` means that none is shown, not that there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvxfer.evals.statistics import holm, rank_correlation
from kvxfer.report.numbers import number, p_text, percent
from kvxfer.report.table import Table
from tools.results_page.comparing import LEVEL, difference
from tools.results_page.data import MapResult, PairResults, shared_overrides

COLLAPSE = 0.5
"""A rank has collapsed when it loses at least this share of the gap between source and ceiling."""


_SWEPT = {
    "maps": ("solver", "penalty", "rank", "features"),
    "alpha": ("penalty", "penalty.lam", "penalty.alpha"),
    "rank": ("rank", "rank.r", "rank.metric"),
}
"""What the grids of ``sweeps/`` that findings come from say by themselves."""


@dataclass(frozen=True)
class Verdict:
    """What a pair says about a finding, with its numbers.

    Attributes:
        grid: the one of ``sweeps/`` that asks for its maps; None: no single one does.
        maps: those maps, none if they are missing.
        also: a map beside the grid.
    """

    kind: Literal["confirmed", "contradicted", "not shown", "no difference found", "not measured"]
    numbers: str
    grid: str | None
    maps: Sequence[MapResult] = ()
    also: MapResult | None = None


def findings_table(pairs: Iterable[PairResults]) -> list[str]:
    """Every finding on every pair."""
    rows = []
    for number_, (claim, check) in enumerate(FINDINGS, start=1):
        for pair in pairs:
            found = check(pair)
            rows.append((f"{number_}. {claim}", pair.name, f"**{found.kind}**", found.numbers, made_by(pair, found)))
    return [*Table(("Finding", "Pair", "Verdict", "Numbers", "Made by"), rows, right=False).markdown(), ""]


def made_by(pair: PairResults, found: Verdict) -> str:
    """The commands that give a verdict's maps again; of what was not measured, those that would measure it."""
    if found.grid is None:
        return f"all [commands](#the-commands) of `{pair.option}`"
    same = shared_overrides(found.maps or pair.calibrated_alike)
    # Of maps that are missing, only k and the calibration are known.
    told = [part for part in same if found.maps or part.startswith(("solver.k=", "calibration."))]
    own = [part for part in told if part.partition("=")[0] not in _SWEPT[found.grid]]
    command = f"`{' '.join((f'python evaluate.py -cd sweeps -cn {found.grid} {pair.asked}', *own))}`"
    return command if found.also is None else f"{command} and `{pair.command(found.also)}`"


def attention_penalty(pair: PairResults) -> Verdict:
    """Tuned maps that differ in the penalty alone, compared pairwise."""
    rows = pair.rows
    keys = [key for key in rows if key[1] == "attention" and (key[0], "isotropic", *key[2:]) in rows]
    if not keys:
        return Verdict("not measured", "no map under both penalties", "maps")
    found = [difference(rows[k].scores, rows[k[0], "isotropic", *k[2:]].scores, pair.baseline) for k in keys]
    corrected = holm([each.p for each in found])
    differ = [each for each, p in zip(found, corrected, strict=True) if each.outcome(p) != "none"]
    better = sum(each.nats < 0 for each in differ)
    largest = max(found, key=lambda each: abs(each.nats))
    numbers = (
        f"{len(found)} pairs of maps: {better} better with attention, {len(differ) - better} worse (Holm, smallest "
        f"{p_text(min(corrected))}); the largest difference is {number(largest.nats, sign=True)} nats per token"
    )
    compared = [rows[k[0], penalty, *k[2:]] for k in keys for penalty in ("isotropic", "attention")]
    return Verdict("contradicted" if differ else "confirmed", numbers, "maps", compared)


def alpha_monotone(pair: PairResults) -> Verdict:
    """Nats along α at one λ: do the ends differ, and does no step go against them, or none that a test sees?"""
    swept = [m for m in pair.calibrated_alike if _is_number(m.dial("penalty", "alpha"))]
    fixed = [m for m in swept if _is_number(m.dial("penalty", "lam"))]
    line = sorted(_largest(fixed, ("penalty", "alpha")), key=lambda m: m.dial("penalty", "alpha"))
    alphas = [m.dial("penalty", "alpha") for m in line]
    if len(alphas) < 3:
        return Verdict("not measured", "fewer than 3 values of α at one λ", "alpha")
    nats = [pair.baseline.per_token(m.scores) for m in line]
    ends = difference(line[-1].scores, line[0].scores, pair.baseline)
    steps = [difference(after.scores, before.scores, pair.baseline) for before, after in itertools.pairwise(line)]
    against = [step for step in steps if step.nats * ends.nats < 0]
    rho = rank_correlation(alphas, nats)
    trend = "" if rho is None else f", Spearman of α and nats {number(rho[0], 2, sign=True)} ({p_text(rho[1])})"
    way = "quality falls" if ends.nats > 0 else "quality rises"
    numbers = (
        f"nats per token {_along(alphas, nats)} at λ = {line[0].dial('penalty', 'lam'):g}{trend}; ends: "
        f"{number(ends.nats, sign=True)} ({p_text(ends.p)})"
    )
    if ends.p >= LEVEL:
        return Verdict("no difference found", numbers, "alpha", line)
    if against:
        seen = any(step.p < LEVEL for step in against)
        return Verdict("contradicted" if seen else "not shown", numbers, "alpha", line)
    return Verdict("confirmed", f"{way}: {numbers}", "alpha", line)


def attention_rank(pair: PairResults) -> Verdict:
    """Reduced rank in the attention metric against the isotropic one, at every rank that has both."""
    line = _largest(_ranked(pair), ("rank", "r"), ("rank", "metric"))
    by = {(m.dial("rank", "r"), m.dial("rank", "metric")): m for m in line}
    ranks = sorted({r for r, metric in by if metric == "attention" and (r, "isotropic") in by})
    if not ranks:
        return Verdict("not measured", "no rank in both metrics", "rank")
    found = [difference(by[r, "attention"].scores, by[r, "isotropic"].scores, pair.baseline) for r in ranks]
    corrected = holm([each.p for each in found])
    outcomes = [each.outcome(p) for each, p in zip(found, corrected, strict=True)]
    numbers = (
        f"attention less isotropic, nats per token: {_along(ranks, [each.nats for each in found], sign=True)}; worse "
        f"at {outcomes.count('worse')} and better at {outcomes.count('better')} of {len(ranks)} ranks (Holm, smallest "
        f"{p_text(min(corrected))})"
    )
    if outcomes.count("worse") == len(ranks):
        return Verdict("confirmed", numbers, "rank", line)
    return Verdict("contradicted" if "better" in outcomes else "no difference found", numbers, "rank", line)


def rank_collapse(pair: PairResults) -> Verdict:
    """Nats against the rank, from the smallest rank to the full map with the same settings."""
    ranked = [m for m in _ranked(pair) if m.dial("rank", "metric") == "isotropic"]
    line = sorted(_largest(ranked, ("rank", "r")), key=lambda m: m.dial("rank", "r"))
    full = [m for m in pair.calibrated_alike if m.name("rank") == "full"]
    rest = line[0].settings_without(("rank", "*")) if line else ""
    whole = next((m for m in full if m.settings_without(("rank", "*")) == rest), None)
    if whole is None:
        return Verdict("not measured", "no ranks beside the map of full rank with the same settings", "rank")
    known = pair.baseline
    gap = known.per_token(known.conditions["source"]) - known.per_token(known.conditions["ceiling"])
    if gap <= 0:
        return Verdict("not measured", "the ceiling does not beat the source, so there is no gap to lose", "rank")
    found = [difference(m.scores, whole.scores, known) for m in line]
    corrected = holm([each.p for each in found])
    worse = [each.outcome(p) == "worse" for each, p in zip(found, corrected, strict=True)]
    collapsed = [
        m.dial("rank", "r")
        for m, each, is_worse in zip(line, found, worse, strict=True)
        if is_worse and each.nats >= COLLAPSE * gap
    ]
    nats = [known.per_token(m.scores) for m in line]
    ranks = [m.dial("rank", "r") for m in line]
    numbers = (
        f"nats per token {_along(ranks, nats)}, full {number(known.per_token(whole.scores))}; worse than full at "
        f"{sum(worse)} of {len(line)} ranks (Holm), by {percent(COLLAPSE)} of the gap or more at "
        f"{', '.join(f'{r:g}' for r in collapsed) or 'none'}"
    )
    if not any(worse):
        return Verdict("no difference found", numbers, "rank", line, whole)
    return Verdict("confirmed" if collapsed else "contradicted", numbers, "rank", line, whole)


def r2_predicts(pair: PairResults) -> Verdict:
    """Does a higher held-out R² go with fewer nats, over all maps and within one design?"""
    maps = pair.calibrated_alike

    def rank(some: list[MapResult]) -> tuple[float, float] | None:
        return rank_correlation([m.r2 for m in some], [pair.baseline.per_token(m.scores) for m in some])

    overall = rank(maps)
    if overall is None:
        return Verdict("not measured", "fewer than 4 maps that differ", "maps")
    groups = {name: [m for m in maps if m.name("features") == name] for name in sorted({m.key[3] for m in maps})}
    within = [
        f"{name} {number(found[0], 2, sign=True)} ({p_text(found[1])}, n = {len(some)})"
        for name, some in groups.items()
        if (found := rank(some)) is not None
    ]
    numbers = (
        f"Spearman of mean held-out R² and nats {number(overall[0], 2, sign=True)} ({p_text(overall[1])}, n = "
        f"{len(maps)} maps, not independent of one another; "
        f"below 0: it predicts); within designs: {', '.join(within) or 'too few maps'}"
    )
    predicts = overall[1] < LEVEL and overall[0] < 0
    return Verdict("contradicted" if predicts else "confirmed", numbers, None)


FINDINGS: tuple[tuple[str, Callable[[PairResults], Verdict]], ...] = (
    ("The attention penalty changes nothing against the isotropic one", attention_penalty),
    ("Quality goes one way with α", alpha_monotone),
    ("Reduced rank in the attention metric is worse than in the isotropic one at every rank", attention_rank),
    ("Rank truncation collapses quality", rank_collapse),
    ("Held-out R² does not predict quality", r2_predicts),
)


def _ranked(pair: PairResults) -> list[MapResult]:
    return [m for m in pair.calibrated_alike if m.name("rank") == "reduced" and _is_number(m.dial("rank", "r"))]


def _largest(maps: list[MapResult], *varied: tuple[str, str]) -> list[MapResult]:
    """The most maps that differ in nothing but what is varied; of equally many, the first in the alphabet."""
    groups: dict[str, list[MapResult]] = {}
    for one in maps:
        groups.setdefault(one.settings_without(*varied), []).append(one)
    return max((groups[key] for key in sorted(groups)), key=len, default=[])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _along(places: Sequence[float | int], values: Sequence[float], sign: bool = False) -> str:
    """Values with where they are: ``1.234 (0.25), 1.200 (0.5)``."""
    return ", ".join(f"{number(v, sign=sign)} ({p:g})" for p, v in zip(places, values, strict=True))
