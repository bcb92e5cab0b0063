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
from kvxfer.maps.columns import TargetTokens, block_columns, columns, extra_widths, read_source
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.models import rope
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.pair import Pair
from kvxfer.moments.checkpoints import PassState
from kvxfer.moments.layout import Layout
from kvxfer.moments.random_file import RANDOM_FILE, keep_random
from kvxfer.moments.spec import CALIBRATION_SPLITS, CalibrationSpec
from kvxfer.moments.token_weights import attention_received, token_weights
from kvxfer.text.corpus import Rows

log = logging.getLogger("kvxfer")


def layout_for(pair: Pair, spec: CalibrationSpec, kept: Sequence[Sequence[int]] | None = None) -> Layout:
    """What this pass keeps of this pair, of the source layers that each target layer keeps (None: all)."""
    source, target = pair.source.geometry, pair.target.geometry
    layers = spec.source_layers(source.layers)
    widths = extra_widths(spec.features, pair)
    return Layout.of(spec.features, layers, target.layers, source.kv_width, target.kv_heads, widths, kept)


class Extractor:
    """Content of the kept tokens of a batch, as blocks and outputs in a layout's order.

    ``kept`` are their positions in a row. ``random`` are the random features that the pass keeps beside its moments, if
    the layout has any.
    """

    def __init__(self, pair: Pair, layout: Layout, kept: range, random: RandomFeatures | None = None) -> None:
        self.pair, self.layout, self.kept = pair, layout, torch.tensor(kept)
        self.random = None if random is None else random.to(pair.source.device)

    def _at_kept(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "kept width"]:
        return x[:, self.kept.to(x.device)].flatten(0, 1)

    def queries(self, rotated: LayerTensors) -> list[Float[Tensor, "batch heads kept dim"]]:
        """The target's content queries of the kept tokens."""
        kept = self.kept.to(self.pair.target.device)
        cos, sin = (angles[kept] for angles in self.pair.target.cos_sin(rotated[0].shape[2]))
        scaling = self.pair.target.geometry.rotary.scaling
        return [rope.strip(query[:, :, kept], cos, sin, scaling) for query in rotated]

    def weights(self, rotated: LayerTensors, target: KV, clip: float) -> Iterator[Float[Tensor, " tokens"]]:
        """What the kept tokens weigh for each target layer, in the order of the features' rows."""
        scales = self.pair.target.softmax_scales()
        for query, keys, scale in zip(rotated, target.keys, scales, strict=True):
            yield token_weights(attention_received(query, keys, scale), self.kept, clip).flatten()

    def _features(self, source: KV, known: TargetTokens) -> Float[Tensor, "kept columns"]:
        """The columns of all blocks at the kept tokens; random features are computed of these alone."""

        def of(block: Block) -> Float[Tensor, "kept width"]:
            return self._at_kept(block_columns(source, known, None, block))

        blocks = self.layout.blocks
        return torch.cat([random_columns(self.random, b, of) if b.kind in RANDOM else of(b) for b in blocks], dim=1)

    def __call__(
        self, source: KV, target: KV, ids: Int[Tensor, "rows length"]
    ) -> tuple[Float[Tensor, "tokens columns"], Float[Tensor, "tokens outputs width"]]:
        """Features (every block's columns side by side) and outputs of rows that both models have read."""
        known = TargetTokens.of(self.pair, ids, self.layout.blocks)
        x = self._features(self.pair.content("source", source), known)
        own = self.pair.content("target", target)
        y = [self._at_kept(columns(own, Block(layer, kind))) for layer, kind in self.layout.outputs]
        # No float64 on Apple's GPUs; elsewhere products are taken where the tensors are.
        products = "cpu" if self.pair.source.device.type == "mps" else self.pair.source.device
        return x.to(products), torch.stack(y, dim=1).to(products)


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
    extract = Extractor(pair, state.layout, spec.kept(length, skip_first), random)
    saved = time.monotonic()
    for split in CALIBRATION_SPLITS[CALIBRATION_SPLITS.index(state.split) :] if state.split else ():
        for start in range(state.next_row, len(rows[split]), spec.batch_size):
            ids = rows[split].tokens[start : start + spec.batch_size]
            source = read_source(pair, ids, state.layout.blocks)
            metrics = spec.metrics and split == "fit"
            asked = metrics or spec.weighs(split)
            target, queries = pair.target.queries(ids) if asked else (pair.target.prefill(ids), [])
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


def _check_bad(state: PassState, spec: CalibrationSpec, total: int) -> None:
    share = len(state.bad_rows) / total
    split, row = state.bad_rows[-1]
    log.warning("row %d of split %s has a non-finite key or value and is skipped", row, split)
    if share > spec.max_bad_rows:
        raise KvxferError(
            f"{len(state.bad_rows)} of {total} rows have non-finite keys or values, more than "
            f"calibration.max_bad_rows={spec.max_bad_rows:g}: try pair.dtype=float32 or look at the rows in the log"
        )
