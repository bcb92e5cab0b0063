"""The calibration pass: both models read the same rows once, and the moments of every split are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import RANDOM, Block
from kvxfer.maps.columns import TargetTokens, block_columns, extra_widths, read_source
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.models import rope
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.pair import Pair, Side
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


def products_dtype(pair: Pair) -> torch.dtype:
    """In which a pass multiplies: float64 where a model computes in float32, whose digits a fit can use; or float32."""
    return torch.float64 if torch.float32 in (pair.source.dtype, pair.target.dtype) else torch.float32


class Extractor:
    """Content of the kept tokens of a batch, as blocks and outputs in a layout's order.

    ``kept`` are their positions in a row. ``random`` are the random features that the pass keeps beside its moments, if
    the layout has any.
    """

    def __init__(self, pair: Pair, layout: Layout, kept: range, random: RandomFeatures | None = None) -> None:
        self.pair, self.layout, self.kept = pair, layout, kept
        self.random = None if random is None else random.to(pair.source.device)

    def _at_kept(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "kept width"]:
        return x[:, _slice(self.kept)].flatten(0, 1)

    def queries(self, rotated: LayerTensors) -> Iterator[Float[Tensor, "batch kept heads dim"]]:
        """The target's content queries of the kept tokens, layer by layer."""
        turn = self._turn("target", rotated[0].shape[2], self.kept)
        for query in rotated:
            own = query.transpose(1, 2)[:, _slice(self.kept)]
            content = torch.empty(own.shape, dtype=torch.float32, device=own.device)
            rope.turn_into(content, own, *turn)
            # No float64 on Apple's GPUs.
            yield (content.cpu() if content.device.type == "mps" else content).to(products_dtype(self.pair))

    def _turn(self, which: Side, tokens: int, positions: range) -> tuple[Tensor, Tensor]:
        """What strips a model's keys or queries at some positions."""
        model = self.pair.side(which)
        cos, sin = (angles[None, _slice(positions), None] for angles in model.cos_sin(tokens))
        return rope.stripping(cos, sin, model.geometry.rotary.scaling)

    def weights(self, rotated: LayerTensors, target: KV, clip: float) -> Iterator[Float[Tensor, " tokens"]]:
        """What the kept tokens weigh for each target layer, in the order of the features' rows."""
        scales = self.pair.target.softmax_scales()
        for query, keys, scale in zip(rotated, target.keys, scales, strict=True):
            yield token_weights(attention_received(query, keys, scale), torch.tensor(self.kept), clip).flatten()

    def _read(self, which: Side, kv: KV, places: Iterable[tuple[Tensor, Block]]) -> None:
        """Content of a cache's keys and values at the kept tokens into columns, each layer read once."""
        turns: dict[int, tuple[Tensor, Tensor]] = {}
        for place, block in places:
            tensor = getattr(kv, block.kind)[block.layer].transpose(1, 2)
            kept = range(self.kept.start + block.offset, self.kept.stop + block.offset, self.kept.step)
            lack = sum(position < 0 for position in kept)
            kept = kept[lack:]
            place = place.view(kv.batch, len(self.kept), *tensor.shape[2:])
            place[:, :lack] = 0
            own = tensor[:, _slice(kept)]
            if block.kind == "values":
                place[:, lack:].copy_(own)
                continue
            if block.offset not in turns:
                turns[block.offset] = self._turn(which, kv.tokens, kept)
            rope.turn_into(place[:, lack:], own, *turns[block.offset])

    def __call__(
        self, source: KV, target: KV, ids: Int[Tensor, "rows length"]
    ) -> tuple[Float[Tensor, "tokens columns"], Float[Tensor, "tokens outputs width"]]:
        """Features (every block's columns side by side) and outputs of rows that both models have read.

        Where, and in the dtype in which, they are multiplied.
        """
        layout, device = self.layout, source.keys[0].device
        tokens = len(ids) * len(self.kept)
        x = torch.empty(tokens, layout.starts[-1], device=device)
        columns = dict(zip(layout.blocks, x.split(layout.widths, dim=1), strict=True))
        self._read("source", source, ((place, block) for block, place in columns.items() if block.is_source))
        self._read_extras(source, ids, {block: place for block, place in columns.items() if not block.is_source})
        y = torch.empty(tokens, len(layout.outputs), layout.width, device=target.keys[0].device)
        outputs = [(y[:, n], Block(layer, kind)) for n, (layer, kind) in enumerate(layout.outputs)]
        self._read("target", target, outputs)
        # No float64 on Apple's GPUs; elsewhere products are taken where the tensors are.
        products = "cpu" if device.type == "mps" else device
        dtype = products_dtype(self.pair)
        return x.to(products).to(dtype), y.to(products).to(dtype)

    def _read_extras(self, source: KV, ids: Int[Tensor, "rows length"], places: dict[Block, Tensor]) -> None:
        """The columns of all other blocks; random features are computed of the kept tokens alone."""
        if not places:
            return
        known = TargetTokens.of(self.pair, ids, tuple(places))
        content = source
        if any(block.kind in RANDOM for block in places):
            content = self.pair.content("source", source)

        def of(block: Block) -> Float[Tensor, "kept width"]:
            return self._at_kept(block_columns(content, known, None, block))

        for block, place in places.items():
            place.copy_(random_columns(self.random, block, of) if block.kind in RANDOM else of(block))


def _slice(positions: range) -> slice:
    """Positions of a row, none of them negative."""
    return slice(positions.start, positions.stop, positions.step)


def finite_rows(*caches: KV) -> Tensor:
    """Which rows hold no NaN or infinity in any layer."""
    sums = []
    for kv in caches:
        for tensor in (*kv.keys, *kv.values, *([] if kv.hidden is None else [kv.hidden])):
            # One value that is not finite makes the sum so.
            sums.append(tensor.sum((1, 2, 3)[: tensor.dim() - 1], dtype=torch.float32).cpu())
    return torch.stack(sums).isfinite().all(0)


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
