"""The first of two passes: which source layers each target layer keeps, from a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import Ridge, Splits
from kvxfer.fitting.closed.engine import Engine
from kvxfer.fitting.closed.selection import best, single_layer_scores
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import Extractor, finite_rows, layout_for
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.schedule import first_pass
from kvxfer.moments.spec import SELECTION_SPLITS, CalibrationSpec
from kvxfer.text.corpus import Rows

_DESIGN = DESIGNS["both"]

SPOOL = "first-pass-"
"""How folders begin in which caches of the first pass lie meanwhile; a killed one leaves its own."""


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


class _Read:
    """What both models make of a few rows, read once, however often it is asked for.

    Where they are needed again, the caches lie in files, in the models' own dtypes.
    """

    def __init__(self, pair: Pair, rows: dict[str, Rows], batch_size: int, folder: Path | None) -> None:
        self._pair, self._rows, self._size, self._folder = pair, rows, batch_size, folder

    def batches(self, split: str) -> Iterator[tuple[KV, KV, Int[Tensor, "rows length"]]]:
        """The source's and the target's caches of rows whose keys and values are all finite, and the rows."""
        for number, ids in enumerate(self._rows[split].tokens.split(self._size)):
            file = None if self._folder is None else self._folder / f"{split}.{number}.safetensors"
            if file is None or not file.exists():
                source, target = self._pair.source.prefill(ids), self._pair.target.prefill(ids)
                good = finite_rows(source, target)
                source, target = source.rows(good), target.rows(good)
                if file is not None:
                    _write(file, {"source": source, "target": target}, good)
            else:
                source, target, good = _stored(file, self._pair.source.device)
            yield source, target, ids[good]


def _write(file: Path, caches: dict[str, KV], good: Tensor) -> None:
    tensors = {
        f"{which}.{kind}.{layer}": x.contiguous()
        for which, kv in caches.items()
        for kind in KINDS
        for layer, x in enumerate(getattr(kv, kind))
    }
    save_file({**tensors, "good": good}, file)


def _stored(file: Path, device: torch.device) -> tuple[KV, KV, Tensor]:
    found = load_file(file, device=str(device))

    def cache(which: str) -> KV:
        layers = range(len([name for name in found if name.startswith(f"{which}.keys.")]))
        keys, values = ([found[f"{which}.{kind}.{layer}"] for layer in layers] for kind in KINDS)
        return KV(keys, values)

    return cache("source"), cache("target"), found["good"].cpu()


def choose_kept(
    pair: Pair,
    rows: dict[str, Rows],
    spec: CalibrationSpec,
    skip_first: int,
    advance: Callable[[int], None],
    folder: Path,
) -> Kept:
    """Score every source layer alone for every target layer, by ridge on both kinds, and keep the best.

    The models read the rows once. Moments are made for as many source layers at a time as fit into memory together;
    what is scored does not depend on the grouping.

    Args:
        rows: the rows of the fit and the validation split that are read.
        advance: called with the number of source layers that were scored.
        folder: where caches may lie meanwhile.
    """
    candidates = spec.source_layers(pair.source.geometry.layers)
    home, together = first_pass(pair, len(SELECTION_SPLITS) * _layout(pair, spec, candidates[:1]).bytes)
    scores: list[torch.Tensor] = []
    with TemporaryDirectory(dir=folder, prefix=SPOOL) as spool:
        read = _Read(pair, rows, spec.batch_size, Path(spool) if together < len(candidates) else None)
        for start in range(0, len(candidates), together):
            group = candidates[start : start + together]
            fit, validation = (_moments(pair, group, read, split, spec, skip_first, home) for split in SELECTION_SPLITS)
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


def _moments(
    pair: Pair, layers: list[int], read: _Read, split: str, spec: CalibrationSpec, skip_first: int, home: str
) -> Moments:
    """The moments of some source layers over a few rows, without those that have a non-finite value."""
    moments = Moments(_layout(pair, spec, layers), home)
    for source, target, ids in read.batches(split):
        extract = Extractor(pair, moments.layout, spec.kept(ids.shape[1], skip_first))
        moments.update(*extract(source, target, ids))
    if not moments.count:
        raise KvxferError(
            "no row of the first pass has finite keys and values: try pair.dtype=float32, or raise "
            "calibration.selection_rows"
        )
    return moments
