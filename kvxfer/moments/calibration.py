"""The calibration pass: both models read the same rows once, and the moments of every split are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import RANDOM, Block
from kvxfer.maps.columns import TargetTokens, extra_widths, hidden_states, read_source
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.models import rope
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.pair import Pair, Side
from kvxfer.moments.checkpoints import PassState
from kvxfer.moments.moments import Layout
from kvxfer.moments.random_file import RANDOM_FILE, keep_random
from kvxfer.moments.spec import CALIBRATION_SPLITS, SELECTION_SPLITS, CalibrationSpec
from kvxfer.moments.token_weights import attention_received, token_weights
from kvxfer.text.corpus import Rows

__all__ = [
    "CALIBRATION_SPLITS",
    "SELECTION_SPLITS",
    "CalibrationSpec",
    "Extractor",
    "accumulate",
    "finite_rows",
    "kept_positions",
    "layout_for",
]

log = logging.getLogger("kvxfer")


def layout_for(pair: Pair, spec: CalibrationSpec, kept: Sequence[Sequence[int]] | None = None) -> Layout:
    """What this pass keeps of this pair, of the source layers that each target layer keeps (None: all)."""
    source, target = pair.source.geometry, pair.target.geometry
    layers = spec.source_layers(source.layers)
    widths = extra_widths(spec.features, pair)
    return Layout.of(spec.features, layers, target.layers, source.kv_width, target.kv_heads, widths, kept)


def kept_positions(length: int, skip_first: int, stride: int) -> Tensor:
    """The positions of a row that enter the moments."""
    return torch.arange(skip_first, length, stride)


class Extractor:
    """Content of the kept tokens of a batch, as blocks and outputs in a layout's order.

    ``random`` are the random features that the pass keeps beside its moments, if the layout has any.
    """

    def __init__(
        self,
        pair: Pair,
        layout: Layout,
        length: int,
        skip_first: int,
        stride: int,
        random: RandomFeatures | None = None,
    ) -> None:
        self.pair, self.layout = pair, layout
        self.kept = kept_positions(length, skip_first, stride)
        self.angles = {which: pair.side(which).cos_sin(length) for which in ("source", "target")}
        self.random = None if random is None else random.to(pair.source.device)

    def _columns(self, which: Side, kv: KV, layer: int, kind: str, offset: int) -> Float[Tensor, "tokens width"]:
        """One layer's kept tokens (or those ``-offset`` before them; zeros before the row's start)."""
        model: LoadedModel = self.pair.side(which)
        positions = (self.kept + offset).clamp_min(0).to(model.device)
        tensor = getattr(kv, kind)[layer][:, :, positions].float()
        if kind == "keys":
            cos, sin = self.angles[which]
            tensor = rope.strip(tensor, cos[positions], sin[positions], model.geometry.rotary.scaling)
        tensor = tensor.transpose(1, 2).flatten(2)
        if offset:
            tensor = tensor * (self.kept + offset >= 0).to(tensor)[:, None]
        return tensor.flatten(0, 1)

    def queries(self, rotated: LayerTensors) -> list[Float[Tensor, "batch heads kept dim"]]:
        """The target's content queries of the kept tokens."""
        kept = self.kept.to(self.pair.target.device)
        cos, sin = (angles[kept] for angles in self.angles["target"])
        scaling = self.pair.target.geometry.rotary.scaling
        return [rope.strip(query[:, :, kept], cos, sin, scaling) for query in rotated]

    def weights(self, rotated: LayerTensors, target: KV, clip: float) -> Iterator[Float[Tensor, " tokens"]]:
        """What the kept tokens weigh for each target layer, in the order of the features' rows."""
        scales = self.pair.target.softmax_scales()
        for query, keys, scale in zip(rotated, target.keys, scales, strict=True):
            yield token_weights(attention_received(query, keys, scale), self.kept, clip).flatten()

    def _block(self, source: KV, known: TargetTokens, block: Block) -> Float[Tensor, "tokens width"]:
        """The columns of one feature block at the kept tokens."""
        if block.is_source:
            return self._columns("source", source, block.layer, block.kind, block.offset)
        if block.kind in RANDOM:
            return random_columns(self.random, block, lambda b: self._columns("source", source, b.layer, b.kind, 0))
        columns = hidden_states(source).float() if block.kind == "source_hidden" else known.columns(block)
        return columns[:, self.kept.to(columns.device)].flatten(0, 1)

    def __call__(
        self, source: KV, target: KV, ids: Int[Tensor, "rows length"]
    ) -> tuple[Float[Tensor, "tokens columns"], Float[Tensor, "tokens outputs width"]]:
        """Features (every block's columns side by side) and outputs of rows that both models have read."""
        known = TargetTokens.of(self.pair, ids, self.layout.blocks)
        x = [self._block(source, known, block) for block in self.layout.blocks]
        y = [self._columns("target", target, layer, kind, 0) for layer, kind in self.layout.outputs]
        # No float64 on Apple's GPUs; elsewhere products are taken where the tensors are.
        products = "cpu" if self.pair.source.device.type == "mps" else self.pair.source.device
        return torch.cat(x, dim=1).to(products), torch.stack(y, dim=1).to(products)


def _target_pass(pair: Pair, ids: Tensor, with_queries: bool) -> tuple[KV, LayerTensors]:
    """The target's cache, and each layer's rotated queries if they are wanted."""
    return pair.target.queries(ids) if with_queries else (pair.target.prefill(ids), [])


def finite_rows(*caches: KV) -> Tensor:
    """Which rows hold no NaN or infinity in any layer."""
    good = torch.ones(caches[0].batch, dtype=torch.bool)
    for kv in caches:
        for tensor in (*kv.keys, *kv.values, *([] if kv.hidden is None else [kv.hidden])):
            good &= torch.isfinite(tensor).flatten(1).all(1).cpu()
    return good


def accumulate(
    pair: Pair,
    rows: dict[str, Rows],
    spec: CalibrationSpec,
    skip_first: int,
    state: PassState,
    advance: Callable[[int], None],
) -> None:
    """Run the pass (or the rest of a killed one) and leave one moments file per split in the state's directory.

    Order, batches and dtypes do not depend on when the pass was interrupted, so neither do the sums.
    """
    length = next(iter(rows.values())).tokens.shape[1]
    total = sum(len(r) for r in rows.values())
    random = keep_random(state.layout, state.work / RANDOM_FILE)
    extract = Extractor(pair, state.layout, length, skip_first, spec.stride, random)
    saved = time.monotonic()
    for split in CALIBRATION_SPLITS[CALIBRATION_SPLITS.index(state.split) :] if state.split else ():
        for start, ids in _batches(rows[split].tokens, spec.batch_size, state.next_row):
            source = read_source(pair, ids, state.layout.blocks)
            metrics = spec.metrics and split == "fit"
            target, queries = _target_pass(pair, ids, metrics or spec.weighs(split))
            good = finite_rows(source, target)
            if not good.all():
                queries = [query[good] for query in queries]
                state.bad_rows += [[split, start + int(i)] for i in torch.nonzero(~good).flatten()]
                source, target, ids = source.rows(good), target.rows(good), ids[good]
                _check_bad(state, spec, total)
            x, y = extract(source, target, ids)
            state.moments.update(x, y)
            if spec.weighs(split):
                state.update_weighted(x, y, extract.weights(queries, target, spec.weight_clip))
            if metrics:
                state.queries.update(extract.queries(queries))
            if split == "fit":
                for which, kv in (("source", source), ("target", target)):
                    state.sinks[which].update(kv, ids)
            state.next_row = min(start + spec.batch_size, len(rows[split]))
            state.tokens_read += (state.next_row - start) * length
            advance((state.next_row - start) * length)
            if time.monotonic() - saved >= 60 * spec.checkpoint_minutes:
                state.save()
                saved = time.monotonic()
        state.finish_split(CALIBRATION_SPLITS)


def _batches(tokens: Tensor, size: int, first: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(first, len(tokens), size):
        yield start, tokens[start : start + size]


def _check_bad(state: PassState, spec: CalibrationSpec, total: int) -> None:
    share = len(state.bad_rows) / total
    split, row = state.bad_rows[-1]
    log.warning("row %d of split %s has a non-finite key or value and is skipped", row, split)
    if share > spec.max_bad_rows:
        raise KvxferError(
            f"{len(state.bad_rows)} of {total} rows have non-finite keys or values, more than "
            f"calibration.max_bad_rows={spec.max_bad_rows:g}: try pair.dtype=float32 or look at the rows in the log"
        )
