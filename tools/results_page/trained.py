"""The table of a pair's trained maps: each with all its seeds, against its base and the best closed form."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import MOST_NATS, holm, paired_difference
from kvxfer.report.numbers import NOTHING, number, p_value, percent, perplexity, points, quantity
from kvxfer.report.table import Table
from kvxfer.report.wording import condition_name
from tools.results_page.comparing import Difference, difference
from tools.results_page.data import Baseline, Json, MapResult, PairResults, Scores
from tools.results_page.tables import BASELINES, COST, SHARE


@dataclass(frozen=True)
class Seeds:
    """Trained maps that differ in nothing but the seed of their training, in its order."""

    maps: list[MapResult]

    @property
    def first(self) -> MapResult:
        """One of them."""
        return self.maps[0]

    @property
    def scores(self) -> Scores:
        """Every item's mean over the seeds; answers are not averaged."""
        return Scores(np.mean([one.scores.nats for one in self.maps], axis=0), None)

    @property
    def right(self) -> Float[np.ndarray, " items"] | None:
        """Of every item, the share of seeds that answer it right."""
        answers = [one.scores.correct for one in self.maps if one.scores.correct is not None]
        return np.mean(answers, axis=0) if answers else None

    @property
    def accuracy(self) -> float | None:
        """The mean share of right answers."""
        shares = [share for one in self.maps if (share := one.scores.accuracy) is not None]
        return sum(shares) / len(shares) if shares else None

    def mean(self, *path: str) -> float:
        """The mean of a number of their trainings."""
        return sum(float(_inside(one.data["training"], path)) for one in self.maps) / len(self.maps)


def trained_table(pair: PairResults) -> list[str]:
    """Trained maps (a row for each setting, over its seeds), the closed forms they are compared with, and baselines."""
    if not pair.trained or not pair.maps:
        raise KvxferError(
            f"results of {pair.name} have no trained map beside a closed form: run python evaluate.py -cd sweeps -cn "
            f"trained pair={pair.option} eval=mapped and collect again"
        )
    groups, known = grouped(pair.trained), pair.baseline
    shared = Shared.of(pair)
    best = min(pair.maps, key=lambda one: (known.per_token(one.scores), one.handoff, one.settings_without()))
    bases = {id(group): _base(pair, group) for group in groups}
    against = [difference(group.scores, bases[id(group)].scores, known) for group in groups]
    to_best = [difference(group.scores, best.scores, known) for group in groups]
    corrected, to_best_corrected = (holm([each.p for each in tests]) for tests in (against, to_best))
    answers = _answers(groups, [bases[id(group)] for group in groups], known)
    lines: list[tuple[float, list[str]]] = []
    for n, group in enumerate(groups):
        cells = [f"`{shared.rest(group.first)}`", *_quality(pair, group, best)]
        cells += [*_tested(against[n], corrected[n]), *answers[n], *_tested(to_best[n], to_best_corrected[n])]
        lines.append((known.per_token(group.scores), [*cells, *_cost(group.first), _time(group), *_training(group)]))
    closed = {one.data["map"]: one for one in [*(bases[id(group)] for group in groups), best] if not one.trained}
    for one in closed.values():
        name = f"`{shared.rest(one)}` ({'best closed form' if one is best else 'base'})"
        lines.append((known.per_token(one.scores), [name, *_closed(pair, one, groups)]))
    for name in (each for each in BASELINES if each in known.conditions):
        nats = known.per_token(known.conditions[name])
        scores = known.conditions[name]
        cells = [f"**{condition_name(name, short=True)}**", NOTHING, percent(scores.accuracy), *_nats(known, scores)]
        lines.append((nats, [*cells, *[NOTHING] * (len(HEADER) - len(cells))]))
    rows = [cells for _, cells in sorted(lines, key=lambda line: (line[0], line[1]))]
    return [_said(pair, best, shared), "", *Table(HEADER, rows).markdown(), ""]


HEADER = (
    *("Map", "Seeds", "Accuracy", "Perplexity", "Nats per token", "Each seed", "Gap recovered (nats)"),
    *(
        "Of what the best closed form leaves",
        "KL",
        "Cosine",
        "Δ nats to base",
        "p (Holm)",
        "Δ accuracy to base",
        "p (Holm)",
        "Δ nats to best",
        "p (Holm)",
    ),
    *("Parameters", "Bytes", SHARE, "Time to map", "Steps", "Best step", "Seconds"),
)


@dataclass(frozen=True)
class Shared:
    """What the commands of a table's maps have in common, so that its rows need not say it.

    Attributes:
        by_all: of all maps.
        by_trained: of the trained ones alone.
    """

    by_all: list[str]
    by_trained: list[str]

    @staticmethod
    def of(pair: PairResults) -> Shared:
        """What maps of a pair share; each row names its solver."""
        trained = _common(pair.trained)
        both = [part for part in trained if part in _common(pair.maps)]
        return Shared(both, [part for part in trained if part not in both])

    def rest(self, one: MapResult) -> str:
        """The command of a map without it."""
        unsaid = {*self.by_all, *(self.by_trained if one.trained else ())}
        return " ".join(part for part in _parts(one) if part not in unsaid)


def _common(maps: Sequence[MapResult]) -> list[str]:
    parts = [_parts(one) for one in maps]
    return [part for part in parts[0] if not part.startswith("solver=") and all(part in others for others in parts)]


def _parts(one: MapResult) -> list[str]:
    """A map's command less its seed."""
    return [part for part in one.overrides.split() if not part.startswith("trainer.seed=")]


def grouped(maps: Sequence[MapResult]) -> list[Seeds]:
    """Trained maps by all that was asked of them but the seed, in the alphabet's order."""
    found: dict[str, list[MapResult]] = {}
    for one in maps:
        trainer = {key: value for key, value in one.data["trainer"].items() if key != "seed"}
        asked = json.dumps([trainer, one.data["training"]["corpus"], one.data["base"]["sha256"]], sort_keys=True)
        found.setdefault(one.settings_without() + asked, []).append(one)
    return [Seeds(sorted(found[key], key=lambda one: one.data["trainer"]["seed"])) for key in sorted(found)]


def _base(pair: PairResults, group: Seeds) -> MapResult:
    """The map that a group was trained on."""
    wanted = group.first.data["base"]
    for one in (*pair.maps, *pair.trained):
        if one.data["map"] == wanted["sha256"]:
            return one
    raise KvxferError(
        f"results of {pair.name}: {group.first.name('solver')} was trained on the map {wanted['run']}, which is not "
        "among them: evaluate that map too and collect both into one file"
    )


def _quality(pair: PairResults, group: Seeds, best: MapResult) -> list[str]:
    """The numbers of a row's scores, from its seeds on."""
    known, scores = pair.baseline, group.scores
    each = ", ".join(number(known.per_token(one.scores)) for one in group.maps)
    seeds = ", ".join(str(one.data["trainer"]["seed"]) for one in group.maps)
    cells = [seeds, percent(group.accuracy), *_nats(known, scores), each, percent(known.gap(scores))]
    learnt = [number(group.mean("held_out", "trained", key)) for key in ("kl", "cosine")]
    rest = rest_recovered(known, scores, best.scores)
    # What a map loses beyond that is told by its nats; the best may leave next to nothing.
    return [*cells, percent(rest) if rest is None or rest >= -1 else f"below {percent(-1.0)}", *learnt]


def rest_recovered(known: Baseline, scores: Scores, best: Scores) -> float | None:
    """What some scores recover, in nats, of what the best closed form leaves to the ceiling; None if it leaves none."""
    ceiling, least = known.per_token(known.conditions["ceiling"]), known.per_token(best)
    return None if least <= ceiling else (least - known.per_token(scores)) / (least - ceiling)


def _closed(pair: PairResults, one: MapResult, groups: Sequence[Seeds]) -> list[str]:
    """The rest of a closed form's row; its KL and cosine are known where something was trained on it."""
    known, scores = pair.baseline, one.scores
    cells = [NOTHING, percent(scores.accuracy), *_nats(known, scores), NOTHING]
    on_it = [group for group in groups if group.first.data["base"]["sha256"] == one.data["map"]]
    learnt = [number(on_it[0].mean("held_out", "base", key)) if on_it else NOTHING for key in ("kl", "cosine")]
    time = f"{1:.2f}" if on_it else NOTHING
    return [*cells, percent(known.gap(scores)), NOTHING, *learnt, *[NOTHING] * 6, *_cost(one), time, *[NOTHING] * 3]


def _nats(known: Baseline, scores: Scores) -> list[str]:
    nats = known.per_token(scores)
    return [perplexity(math.exp(nats)) if nats < MOST_NATS else NOTHING, number(nats)]


def _tested(found: Difference, corrected: float) -> list[str]:
    return [number(found.nats, sign=True), p_value(corrected)]


def _answers(groups: Sequence[Seeds], bases: Sequence[MapResult], known: Baseline) -> list[list[str]]:
    """Each row's difference to its base in accuracy, tested over documents: a share of seeds is no yes or no."""
    found = []
    for group, base in zip(groups, bases, strict=True):
        if group.right is None or base.scores.correct is None:
            return [[NOTHING] * 2 for _ in groups]
        found.append(paired_difference(group.right, base.scores.correct, known.documents))
    corrected = holm([each["t_p"] for each in found])
    return [[points(each["difference"]), p_value(p)] for each, p in zip(found, corrected, strict=True)]


def _cost(one: MapResult) -> list[str]:
    cost = one.data["cost"]
    return [quantity(cost["parameters"]), quantity(cost["bytes"]), percent(one.handoff)]


def _time(group: Seeds) -> str:
    """The time to map in its base's, as measured after each training."""
    known = all("map_seconds_ratio" in one.data["training"] for one in group.maps)
    return f"{group.mean('map_seconds_ratio'):.2f}" if known else NOTHING


def _training(group: Seeds) -> list[str]:
    return [f"{group.mean(key):,.0f}" for key in ("steps", "best_step", "seconds")]


def _said(pair: PairResults, best: MapResult, shared: Shared) -> str:
    known = pair.baseline
    own = f", the trained ones `{' '.join(shared.by_trained)}`" if shared.by_trained else ""
    return (
        f"{len(pair.trained)} trained maps, {len(known.documents)} items of {len(set(known.documents))} documents that "
        f"no map has seen. All have `{' '.join(shared.by_all)}`{own}. A row is the mean over its seeds, each seed's "
        "nats beside it. KL (nats per token) and cosine of attention outputs: on the held-out rows of the training's "
        "own text. Δ: against the base of each row, and against the best closed form on these very items (of "
        f"{len(pair.maps)}: `{shared.rest(best)}`); paired t over documents of every item's mean over seeds, "
        "of nats and of right answers, corrected for all rows (Holm). "
        f"{COST} Time to map: in its base's, both "
        "measured in turns in one process after the training. Steps, best step and seconds: means over seeds."
    )


def _inside(value: Json, path: Sequence[str]) -> float:
    for key in path[:-1]:
        value = value[key]
    return float(value[path[-1]])
