"""The tables about one pair. Each is a function of its results that gives Markdown lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import MARGIN, MOST_NATS, holm
from kvxfer.report.numbers import NOTHING, interval, number, p_value, percent, perplexity, points, quantity
from kvxfer.report.table import Table
from kvxfer.report.wording import condition_name
from tools.results_page.comparing import Difference, difference
from tools.results_page.data import MapResult, PairResults, Scores, one_each

COST = "Handoff: FLOPs of a whole handoff under the plan, as a share of the target's own prefill of the same tokens."
SHARE = "Handoff"
PLAIN = ("ridge", "isotropic", "full", "same")
"""The row that the others are compared with."""

BASELINES = ("ceiling", "source", "no_context", "raw_copy", "ancestor_copy", "floor")


def require(pair: PairResults, maps: Sequence[object], what: str, grid: str) -> None:
    """KvxferError where there is nothing to show."""
    if not maps:
        raise KvxferError(
            f"results of {pair.name} have no {what}: run python evaluate.py -cd sweeps -cn {grid} {pair.asked} and "
            "collect again"
        )


def quality(pair: PairResults, scores: Scores) -> tuple[str, ...]:
    """Accuracy, perplexity, nats and gap recovered, for cells."""
    nats = pair.baseline.per_token(scores)
    shown = perplexity(math.exp(nats)) if nats < MOST_NATS else NOTHING
    shares = (pair.baseline.gap(scores), pair.baseline.gap_accuracy(scores), pair.baseline.context(scores))
    return (percent(scores.accuracy), shown, number(nats), *map(percent, shares))


QUALITY = (
    *("Accuracy", "Perplexity", "Nats per token"),
    *("Gap recovered (nats)", "Gap recovered (accuracy)", "Context recovered (nats)"),
)


def maps_table(pair: PairResults) -> list[str]:
    """Every solver, penalty, rank and features at its own tuned setting, beside the baselines, best first."""
    rows = pair.rows
    require(pair, list(rows), "map whose λ, α and rank are auto", "maps")
    if PLAIN not in rows:
        raise KvxferError(
            f"results of {pair.name} have no plain ridge to compare with: run python evaluate.py {pair.asked} "
            "solver=ridge penalty=isotropic rank=full features=same and collect again"
        )
    others = [key for key in rows if key != PLAIN]
    found = {key: difference(rows[key].scores, rows[PLAIN].scores, pair.baseline) for key in others}
    corrected = dict(zip(others, holm([found[key].p for key in others]), strict=True))
    answers = [(key, p) for key in others if (p := found[key].accuracy_p) is not None]
    corrected_answers = dict(zip((key for key, _ in answers), holm([p for _, p in answers]), strict=True))
    lines: list[tuple[float, list[str]]] = []
    for key, one in rows.items():
        cells = [*key, *quality(pair, one.scores)]
        cells += _against(found.get(key), corrected.get(key), corrected_answers.get(key))
        cells += _beaten(pair, one)
        cells += [percent(one.handoff), quantity(one.data["cost"]["parameters"]), *_r2(one)]
        lines.append((pair.baseline.per_token(one.scores), cells))
    for name in BASELINES:
        if (scores := pair.baseline.conditions.get(name)) is not None:
            cells = [f"**{condition_name(name, short=True)}**", *[NOTHING] * 3, *quality(pair, scores)]
            lines.append((pair.baseline.per_token(scores), [*cells, *[NOTHING] * 12]))
    header = (
        *("Solver", "Penalty", "Rank", "Features", *QUALITY, "Δ nats", "p", "p (Holm)", "Δ accuracy", "p", "p (Holm)"),
        *("Source", "Ancestors' copy", SHARE, "Parameters", "R² keys", "R² values"),
    )
    cells_only = [cells for _, cells in sorted(lines, key=lambda line: (line[0], line[1]))]
    said = (
        f"{len(rows)} maps, {_dials(rows[PLAIN])}, {len(pair.baseline.documents)} items of "
        f"{len(set(pair.baseline.documents))} documents. "
        "Δ: against plain ridge (`solver=ridge penalty=isotropic rank=full features=same`); paired t over documents "
        "for nats, exact McNemar by document for accuracy, each corrected for all rows (Holm). Source, ancestors' "
        "copy: better or worse than it in nats (p of the paired t, or of the sign test where only that shows harm; not "
        f"corrected). {COST}"
    )
    return [said, "", *Table(header, cells_only).markdown(), ""]


def _against(found: Difference | None, corrected: float | None, corrected_answers: float | None) -> list[str]:
    if found is None:
        return [NOTHING] * 6
    nats = [number(found.nats, sign=True), p_value(found.p), p_value(corrected)]
    return [*nats, points(found.accuracy), p_value(found.accuracy_p), p_value(corrected_answers)]


def _beaten(pair: PairResults, one: MapResult) -> list[str]:
    known = pair.baseline.conditions
    return [
        difference(one.scores, known[name], pair.baseline).said if name in known else NOTHING
        for name in ("source", "ancestor_copy")
    ]


def _dials(one: MapResult) -> str:
    """What all rows of a table share."""
    return f"k = {one.dial('solver', 'k')}"


def _r2(one: MapResult) -> list[str]:
    return [number(one.data["r2_held_out"][kind]) for kind in ("keys", "values")]


def front(pair: PairResults) -> list[MapResult]:
    """The maps that no other of the same calibration text beats in nats at the same cost or less, cheapest first."""
    found: list[MapResult] = []
    ordered = sorted(pair.rivals, key=lambda m: (m.handoff, pair.baseline.per_token(m.scores), m.settings_without()))
    for one in ordered:
        if not found or pair.baseline.per_token(one.scores) < pair.baseline.per_token(found[-1].scores):
            found.append(one)
    return found


def frontier_table(pair: PairResults) -> list[str]:
    """The Pareto front of cost and nats, under its figure."""
    rows = [
        (
            f"`{one.overrides}`",
            percent(one.handoff),
            quantity(one.data["cost"]["parameters"]),
            *quality(pair, one.scores),
            difference(one.scores, pair.baseline.conditions["source"], pair.baseline).said,
        )
        for one in front(pair)
    ]
    figure = f"![Gap recovered against cost](figures/{figure_name(pair.name)})"
    header = ("Setting", SHARE, "Parameters", *QUALITY, "Source")
    return [
        figure,
        "",
        f"The front of {len(pair.rivals)} maps, {len(pair.beside)} of them trained. {COST}",
        "",
        *Table(header, rows).markdown(),
        "",
    ]


def figure_name(pair: str) -> str:
    """The file of a pair's frontier, beside docs/results.md in figures/."""
    return f"frontier_{pair.replace('/', '_')}.png"


def calibration_table(pair: PairResults) -> list[str]:
    """Plain ridge of every design against how many tokens it was fitted on."""
    plain = [one for one in pair.maps if one.tuned and one.key[:3] == PLAIN[:3]]
    found: dict[tuple[str, int, str], MapResult] = {}
    for text in sorted({one.corpus for one in plain}):
        for key, one in one_each([each for each in plain if each.corpus == text]).items():
            found[key[3], one.data["calibration"]["kept_tokens"], text] = one
    require(pair, list(found), "plain ridge", "calibration_size")
    rows = []
    for (features, tokens, _), one in sorted(found.items(), key=lambda item: item[0]):
        corpus = one.data["calibration"]["corpus"]
        cells = (features, f"{corpus['name']}, seed {corpus['seed']}", f"{tokens:,}", f"{one.data['columns']:,}")
        rows.append((*cells, f"{tokens / one.data['columns']:.1f}", *quality(pair, one.scores), *_r2(one)))
    header = ("Features", "Text", "Fit tokens", "Columns", "Tokens per column", *QUALITY, "R² keys", "R² values")
    return [*Table(header, rows).markdown(), ""]


def features_table(pair: PairResults) -> list[str]:
    """What each design of ridge gives, and what it costs at serve time."""
    rows = {key[3]: one for key, one in pair.rows.items() if key[:3] == PLAIN[:3]}
    require(pair, list(rows), "plain ridge", "maps")
    if "same" not in rows:
        raise KvxferError(f"results of {pair.name} have no features=same to compare with: run the grid maps")
    others = [name for name in rows if name != "same"]
    found = {name: difference(rows[name].scores, rows["same"].scores, pair.baseline) for name in others}
    corrected = dict(zip(others, holm([found[name].p for name in others]), strict=True))
    cells = []
    for name, one in sorted(rows.items(), key=lambda item: item[1].share):
        cost, apart = one.data["cost"], (NOTHING, NOTHING)
        if name != "same":
            apart = (number(found[name].nats, sign=True), p_value(corrected[name]))
        sizes = (quantity(cost[key]) for key in ("flops_per_token", "bytes_read_per_token", "bytes_written_per_token"))
        cells.append(
            (
                name,
                *quality(pair, one.scores),
                *apart,
                str(one.data["columns"]),
                percent(one.handoff),
                percent(one.share),
                *sizes,
            )
        )
    header = (
        "Features",
        *QUALITY,
        "Δ nats to same",
        "p (Holm)",
        "Columns",
        SHARE,
        "Map alone",
        "FLOPs",
        "Bytes read",
        "Bytes written",
    )
    said = (
        f"`solver=ridge penalty=isotropic rank=full`, {_dials(rows['same'])}. {COST} Per mapped token: FLOPs, also "
        "as a share of the target's prefill (map alone); bytes read (source cache and what else the map reads) and "
        "written, as bfloat16."
    )
    return [said, "", *Table(header, cells).markdown(), ""]


@dataclass(frozen=True)
class Change:
    """What tells one of two maps from the other, which has the same settings but for some."""

    names: tuple[str, str]
    is_own: Callable[[MapResult], bool]
    is_other: Callable[[MapResult], bool]
    left_out: tuple[str, str]
    grid: str


CHANGES = {
    "blocks": Change(
        ("one λ", "λ per block"),
        lambda m: bool(m.dial("penalty", "per_block")),
        lambda m: not m.dial("penalty", "per_block"),
        ("penalty", "per_block"),
        "per_block",
    ),
    "weighted": Change(
        ("ridge", "weighted"),
        lambda m: m.name("solver") == "weighted" and m.name("penalty") == "isotropic",
        lambda m: m.name("solver") == "ridge",
        ("solver", "name"),
        "maps",
    ),
    "reduced": Change(
        ("full", "reduced"),
        lambda m: m.name("rank") == "reduced" and m.name("penalty") == "isotropic" and m.tuned,
        lambda m: m.name("rank") == "full",
        ("rank", "*"),
        "maps",
    ),
}


def twins_table(pair: PairResults, change: str) -> list[str]:
    """Maps with some setting (a name of ``CHANGES``) against those that differ from them in nothing else."""
    wanted = CHANGES[change]
    key = wanted.left_out
    others = {m.settings_without(key): m for m in pair.calibrated_alike if wanted.is_other(m)}
    own = [m for m in pair.calibrated_alike if wanted.is_own(m) and m.settings_without(key) in others]
    require(pair, own, f"pair of maps for the table {change!r}", wanted.grid)
    twins = sorted(((m, others[m.settings_without(key)]) for m in own), key=lambda two: two[1].overrides)
    compared = [difference(m.scores, other.scores, pair.baseline) for m, other in twins]
    rows = []
    for (m, other), each, p in zip(twins, compared, holm([each.p for each in compared]), strict=True):
        nats = [number(pair.baseline.per_token(one.scores)) for one in (other, m)]
        costs = [percent(one.handoff) for one in (other, m)]
        rows.append((f"`{other.overrides}`", *nats, number(each.nats, sign=True), p_value(each.p), p_value(p), *costs))
    first, second = wanted.names
    header = ("Setting", f"Nats, {first}", f"Nats, {second}", "Δ", "p", "p (Holm)", f"{SHARE}, {first}", second)
    return [*Table(header, rows).markdown(), ""]


def best_table(pair: PairResults) -> list[str]:
    """The map with the lowest nats, and the cheapest that is shown to be as good, by the margin."""
    maps = pair.rivals
    require(pair, maps, "map", "maps")
    best = min(maps, key=lambda m: (pair.baseline.per_token(m.scores), m.handoff, m.settings_without()))
    close = [m for m in maps if m is best or difference(m.scores, best.scores, pair.baseline).as_good]
    cheapest = min(close, key=lambda m: (m.handoff, pair.baseline.per_token(m.scores), m.settings_without()))
    rows = []
    for name, one in (("Best", best), ("Cheapest that is as good", cheapest)):
        ci = "" if one is best else interval(difference(one.scores, best.scores, pair.baseline).ci, "number")
        rows.append((name, *quality(pair, one.scores), ci, percent(one.handoff), f"`{pair.command(one)}`"))
    said = (
        f"The best of {len(maps)} maps ({len(pair.beside)} of them trained) on these items, so part of its lead is "
        "luck. As good: the 95 % interval of "
        f"the difference in nats per token lies below {MARGIN:g} (non-inferiority). {COST}"
    )
    return [said, "", *Table(("", *QUALITY, "Nats above the best, 95 %", SHARE, "Command"), rows).markdown(), ""]


def form_table(pair: PairResults) -> list[str]:
    """The paper's form of a map beside everything that it is compared with."""
    plain = pair.rows.get(PLAIN)
    require(pair, [] if plain is None else [plain], "plain ridge with features=same", "maps")
    assert plain is not None
    known = pair.baseline.conditions
    rows = [
        (f"mapped, {_dials(plain)}", plain.scores),
        *((condition_name(n, True), known[n]) for n in BASELINES if n in known),
    ]
    cells = [(name, *quality(pair, scores)) for name, scores in rows]
    said = f"`{pair.name}`, {len(set(pair.baseline.documents))} documents. {COST} Of this one {percent(plain.handoff)}."
    return [said, "", *Table(("", *QUALITY), cells).markdown(), ""]
