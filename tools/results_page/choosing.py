"""What chooses a λ, and what a budget buys: tables about settings that no person has picked on the items."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import KvxferError
from kvxfer.report.numbers import NOTHING, interval, number, percent
from kvxfer.report.table import Table
from tools.results_page.comparing import difference
from tools.results_page.data import MapResult, PairResults
from tools.results_page.tables import COST, QUALITY, SHARE, quality, require

CRITERIA = {"r2": "R²", "attention": "attention outputs", "kl": "next-token KL"}
BUDGETS = (0.1, 0.25)
"""Shares of the target's prefill."""


def criteria_table(pair: PairResults) -> list[str]:
    """What every criterion's λ costs against the best single λ of a grid, for maps that differ in nothing else."""
    varied = (("penalty", "lam"), ("solver", "criterion"))
    groups: dict[str, list[MapResult]] = {}
    for one in pair.maps:
        groups.setdefault(one.settings_without(*varied), []).append(one)
    found = [(group[0].data["calibration"]["kept_tokens"], key) for key, group in groups.items()]
    rows = [row for _, key in sorted(found) if (row := _regrets(pair, groups[key])) is not None]
    require(pair, rows, "fixed λ beside λ chosen by several criteria", "criteria")
    said = (
        "Nats per token above the best single λ of the grid on these very items (the oracle), with the 95 % interval "
        "of the paired difference. R² and attention outputs choose on validation text without a model's weights, "
        "output by output; next-token KL with both models, one λ for all."
    )
    header = ("Map", "Fit tokens", "Best single λ", "Its nats", *CRITERIA.values())
    return [said, "", *Table(header, rows).markdown(), ""]


def _regrets(pair: PairResults, maps: Sequence[MapResult]) -> tuple[str, ...] | None:
    """One row, or None where the group has no grid or only one criterion."""
    fixed = [one for one in maps if isinstance(one.dial("penalty", "lam"), int | float)]
    chosen = {str(one.dial("solver", "criterion")): one for one in maps if one.dial("penalty", "lam") == "auto"}
    if len(fixed) < 3 or len(chosen) < 2:
        return None
    best = min(fixed, key=lambda one: pair.baseline.per_token(one.scores))
    cells = []
    for name in CRITERIA:
        if name not in chosen:
            cells.append(NOTHING)
            continue
        found = difference(chosen[name].scores, best.scores, pair.baseline)
        cells.append(f"{number(found.nats, sign=True)} {interval(found.ci, 'number')}")
    parts = [part for part in best.overrides.split() if not part.startswith("penalty.lam")]
    lam, nats = best.dial("penalty", "lam"), number(pair.baseline.per_token(best.scores))
    return (f"`{' '.join(parts)}`", f"{best.data['calibration']['kept_tokens']:,}", f"{lam:g}", nats, *cells)


def budget_table(pair: PairResults) -> list[str]:
    """The best map whose whole handoff costs no more than a share of the target's prefill, closed or trained."""
    rows = []
    for budget in BUDGETS:
        for kind in ("closed form", "trained"):
            within = [one for one in pair.rivals if one.trained == (kind == "trained") and one.handoff <= budget]
            if not within:
                continue
            best = min(within, key=lambda one: pair.baseline.per_token(one.scores))
            cells = (percent(best.handoff), *quality(pair, best.scores), f"`{pair.command(best)}`")
            rows.append((f"{budget:.0%}".replace("%", " %"), kind, *cells))
    if not rows:
        raise KvxferError(f"results of {pair.name}: no handoff costs {BUDGETS[-1]:.0%} of a prefill or less")
    said = f"Picked on these very items. {COST}"
    return [said, "", *Table(("At most", "Kind", SHARE, *QUALITY, "Command"), rows).markdown(), ""]
