"""The first of two passes: which source layers each target layer keeps, from a few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import Ridge, Splits
from kvxfer.fitting.closed.engine import Engine
from kvxfer.fitting.closed.selection import best, single_layer_scores
from kvxfer.maps.blocks import DESIGNS
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import Extractor, finite_rows, layout_for
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.schedule import first_pass
from kvxfer.moments.spec import SELECTION_SPLITS, CalibrationSpec
from kvxfer.text.corpus import Rows

_DESIGN = DESIGNS["both"]


@dataclass(frozen=True)
class Kept:
    """The source layers (ascending) that every target layer keeps, and the scores behind the choice.

    Attributes:
        candidates: the source layers that were scored.
        r2: for every target layer, each candidate's validation R², the mean of keys and values.
        layers: for every target layer, the candidates of the best scores.
    """

    candidates: list[int]
    r2: list[list[float]]
    layers: list[list[int]]


def choose_kept(
    pair: Pair, rows: dict[str, Rows], spec: CalibrationSpec, skip_first: int, advance: Callable[[int], None]
) -> Kept:
    """Score every source layer alone for every target layer, by ridge on both kinds, and keep the best.

    The rows are read once for every group of source layers whose moments fit into memory together; what is scored does
    not depend on the grouping.

    Args:
        rows: the rows of the fit and the validation split that are read.
        advance: called with the number of source layers that were scored.
    """
    candidates = spec.source_layers(pair.source.geometry.layers)
    home, together = first_pass(pair, len(SELECTION_SPLITS) * _layout(pair, spec, candidates[:1]).bytes)
    scores: list[torch.Tensor] = []
    for start in range(0, len(candidates), together):
        group = candidates[start : start + together]
        fit, validation = (_moments(pair, group, rows[split], spec, skip_first, home) for split in SELECTION_SPLITS)
        engine = Engine(Ridge(k=1, features=_DESIGN), Splits(fit, validation, validation))
        by_kind = single_layer_scores(engine.quick_score, group, lambda: None)
        scores.append(torch.stack(list(by_kind.values())).mean(0))
        advance(len(group))
        # The next group's moments take their place.
        del engine, fit, validation
    table = torch.cat(scores, dim=1)
    order = best(table, candidates)
    return Kept(candidates, table.tolist(), [sorted(layers[: spec.keep_layers]) for layers in order])


def _layout(pair: Pair, spec: CalibrationSpec, layers: list[int]) -> Layout:
    """Blocks of single source layers, and what predicts every output from one of them."""
    return layout_for(pair, replace(spec, features=_DESIGN, layers=tuple(layers))).singles()


def _moments(pair: Pair, layers: list[int], rows: Rows, spec: CalibrationSpec, skip_first: int, home: str) -> Moments:
    """The moments of some source layers over a few rows, without those that have a non-finite value."""
    moments = Moments(_layout(pair, spec, layers), home)
    extract = Extractor(pair, moments.layout, spec.kept(rows.tokens.shape[1], skip_first))
    for ids in rows.tokens.split(spec.batch_size):
        source, target = pair.source.prefill(ids), pair.target.prefill(ids)
        good = finite_rows(source, target)
        moments.update(*extract(source.rows(good), target.rows(good), ids[good]))
    if not moments.count:
        raise KvxferError(
            "no row of the first pass has finite keys and values: try pair.dtype=float32, or raise "
            "calibration.selection_rows"
        )
    return moments
