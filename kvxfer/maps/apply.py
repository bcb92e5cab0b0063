"""Running a map: the cache that a source holds becomes the target's, in one pass over chunks of tokens.

Of a chunk, each source layer's keys are stripped once, target layers that read the same blocks are one matrix product,
with its bias, in the map's dtype, and what it gives is rotated and written where the target's cache lies. So what is
held beside both caches is a chunk, however long the prompt is. No engine's cache class is known here: ``Views`` are
read and written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import RANDOM, Block, Output
from kvxfer.maps.columns import TargetTokens, hidden_states
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.products import fastest
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.maps.trunks import ACTIVATIONS, Trunk
from kvxfer.maps.views import Views
from kvxfer.models.kv import KV

if TYPE_CHECKING:
    from kvxfer.models.pair import Pair

_TOKENS = {"cpu": 2048}
_BYTES = {"cpu": 1 << 27}
"""A chunk's tokens, all rows together, and bytes: enough for fast products, few enough for a processor's caches."""
_MORE_TOKENS, _MORE_BYTES = 16384, 1 << 30
_APART = 32

Known = Callable[[slice, slice], TargetTokens]
"""What the target knows of some rows' tokens."""


Chunk = tuple[slice, slice]
"""Rows and tokens."""


def unwatched() -> None:
    """Nobody looks at the clock between chunks."""


@dataclass(frozen=True)
class _Product:
    """Outputs that read the same blocks in the same form, as one batched matrix product with its bias."""

    blocks: tuple[Block, ...]
    outputs: list[Output]
    weight: Float[Tensor, "groups features all_inner"]
    right: Float[Tensor, "groups_outputs inner columns"] | None
    bias: Float[Tensor, "products 1 width"]
    groups: int

    @staticmethod
    def of(layers: dict[Output, LinearLayer], device: str | torch.device, dtype: torch.dtype) -> _Product:
        """Layers of the same blocks, groups and inner width, with or without a second factor."""
        first, parts = next(iter(layers.values())), list(layers.values())
        weight = torch.cat([part.weight for part in parts], dim=2).to(device, dtype)
        # Outputs by rows, as products of all dtypes like it.
        weight = weight.mT.contiguous().mT
        bias = torch.stack([part.bias for part in parts]).to(device, dtype)
        bias = bias.unflatten(-1, (first.groups, -1)).transpose(0, 1)
        rights = [part.right for part in parts if part.right is not None]
        # Group-major, so that a view gives [groups, outputs].
        right = torch.stack(rights, dim=1).flatten(0, 1).to(device, dtype) if rights else None
        bias = (bias.flatten(1) if right is None else bias.flatten(0, 1))[:, None].contiguous()
        return _Product(first.blocks, list(layers), weight, right, bias, first.groups)

    def run(self, x: Float[Tensor, "groups rows features"]) -> Float[Tensor, "groups rows outputs _"]:
        """What every output gets of its linear part."""
        count = len(self.outputs)
        if self.right is not None:
            # Each output has its own second factor.
            y = (x @ self.weight).unflatten(-1, (count, -1)).transpose(1, 2).flatten(0, 1)
            return torch.baddbmm(self.bias, y, self.right).unflatten(0, (self.groups, count)).transpose(1, 2)
        if self.groups > 1:
            y = torch.baddbmm(self.bias, x, self.weight)
        else:
            out = _memory.take("products", x, x.shape[1], self.weight.shape[2])
            y = fastest(x.device, x.dtype).run(x[0], self.weight[0], self.bias[0, 0], out)[None]
        return y.unflatten(-1, (count, -1))


@dataclass(frozen=True)
class _Trunks:
    """Trunks of one form over the same blocks: each layer of all of them is one batched matrix product.

    Attributes:
        outputs: of each trunk, those that read it; every trunk has as many.
        first: of the first hidden layers, side by side: they read the same columns.
        later: of the hidden layers after it.
        biases: of each hidden layer.
        readouts: of each trunk, those of its outputs side by side.
    """

    blocks: tuple[Block, ...]
    outputs: list[list[Output]]
    activation: str
    first: Float[Tensor, "inputs all_hidden"]
    later: list[Float[Tensor, "trunks _ _"]]
    biases: list[Float[Tensor, "trunks 1 _"]]
    readouts: Float[Tensor, "trunks hidden all_columns"]

    @staticmethod
    def of(trunks: list[Trunk], device: str | torch.device, dtype: torch.dtype) -> _Trunks:
        """Trunks of the same blocks, activation, hidden widths and number of readouts."""
        layers = list(zip(*(trunk.weights for trunk in trunks), strict=True))
        biases = zip(*(trunk.biases for trunk in trunks), strict=True)
        readouts = torch.stack([torch.cat(list(trunk.readouts.values()), dim=1) for trunk in trunks])
        return _Trunks(
            trunks[0].blocks,
            [list(trunk.readouts) for trunk in trunks],
            trunks[0].activation,
            torch.cat(layers[0], dim=1).to(device, dtype),
            [torch.stack(layer).to(device, dtype) for layer in layers[1:]],
            [torch.stack(bias)[:, None].to(device, dtype) for bias in biases],
            readouts.to(device, dtype),
        )

    def run(self, x: Float[Tensor, "1 rows inputs"]) -> Iterator[tuple[Output, Float[Tensor, "rows width"]]]:
        """What every output that reads one of the trunks gets from it."""
        act = ACTIVATIONS[self.activation]
        h = act(torch.addmm(self.biases[0].flatten(), x[0], self.first))
        h = h.unflatten(-1, (len(self.outputs), -1)).transpose(0, 1)
        for weight, bias in zip(self.later, self.biases[1:], strict=True):
            h = act(torch.baddbmm(bias, h, weight))
        found = (h @ self.readouts).unflatten(-1, (len(self.outputs[0]), -1))
        for number, outputs in enumerate(self.outputs):
            for n, output in enumerate(outputs):
                yield output, found[number, :, n]


class _Memory(threading.local):
    """What chunks use in turns, kept by each thread: memory that is asked for anew is slow at first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """A tensor of unknown content, of this shape; what was taken under this name before is overwritten."""
        if like.device.type != "cpu":  # whose allocators keep memory themselves, for each stream
            return like.new_empty(shape)
        size, key = math.prod(shape), (name, like.device, like.dtype)
        if key not in self._kept or self._kept[key].numel() < size:
            # Training, which is in no inference mode, writes to it too.
            with torch.inference_mode(mode=False):
                self._kept[key] = torch.empty(size, device=like.device, dtype=like.dtype)
        return self._kept[key][:size].view(shape)


_memory = _Memory()


class _Columns:
    """The columns of one chunk's tokens: what the source's layers give, each once, and what else is known of them.

    Attributes:
        rows, tokens: of the chunk; columns are there of ``back`` tokens before them too.
    """

    def __init__(self, mapper: Mapper, source: Views, known: Known, real: Tensor | None, chunk: Chunk) -> None:
        rows, span = chunk
        self.back = min(mapper.lookback, span.start)
        here = slice(span.start - self.back, span.stop)
        self.rows, self.tokens = rows.stop - rows.start, span.stop - span.start
        self._last: tuple[tuple[Block, ...], int, Tensor] = ((), 0, torch.empty(0))
        self._places = mapper.read
        heads, dim = source.keys[0].shape[2:]
        self._width = heads * dim
        width = len(mapper.read) * self._width
        # Rows a power of two apart would share the lines of a processor's cache.
        columns = _memory.take("columns", mapper.like, self.rows, self.back + self.tokens, width + _APART)
        self._columns = columns[..., :width]
        turn = source.turn(rows, here)
        for layer, kind in mapper.read:
            place = self._source(Block(layer, kind)).unflatten(-1, (heads, dim))
            source.copy(kind, layer, rows, here, turn, place)
        padding = None if real is None else ~real[rows, here, None]
        if padding is not None:
            self._columns.masked_fill_(padding, 0)
        self._extras = {}
        about = known(rows, here) if mapper.extras else TargetTokens(None, None)
        for kind in {block.kind for block in mapper.extras}:
            found = self._extra(Block(0, kind), mapper.random, about, source, (rows, here)).to(self._columns)
            self._extras[kind] = found if padding is None else found.masked_fill(padding, 0)

    def _extra(
        self, block: Block, random: RandomFeatures | None, known: TargetTokens, source: Views, chunk: Chunk
    ) -> Float[Tensor, "rows tokens width"]:
        if block.kind in RANDOM:
            return random_columns(random, block, self._source)
        return hidden_states(source.hidden)[chunk] if block.kind == "source_hidden" else known.columns(block)

    def _source(self, block: Block) -> Float[Tensor, "rows tokens width"]:
        place = self._places[block.layer, block.kind] * self._width
        return self._columns[..., place : place + self._width]

    def design(self, blocks: tuple[Block, ...], groups: int) -> Float[Tensor, "groups rows features"]:
        """The columns of blocks side by side; with groups, group g's are those of head g of every block.

        The last design is kept: what comes next often reads it too.
        """
        if self._last[:2] != (blocks, groups):
            self._last = (blocks, groups, self._gathered(blocks, groups))
        return self._last[2]

    def _gathered(self, blocks: tuple[Block, ...], groups: int) -> Float[Tensor, "groups rows features"]:
        if groups == 1 and (self.rows == 1 or not self.back) and (there := self._neighbours(blocks)) is not None:
            return self._columns[:, self.back :, there].flatten(0, 1)[None]
        parts = [self._source(b) if b.is_source else self._extras[b.kind] for b in blocks]
        widths = [part.shape[-1] // groups for part in parts]
        x = _memory.take("design", self._columns, groups, self.rows, self.tokens, sum(widths))
        for block, part, place in zip(blocks, parts, x.split(widths, dim=-1), strict=True):
            # The first tokens of a row have none so far before them.
            lack = min(max(-block.offset - self.back, 0), self.tokens)
            place[:, :, :lack] = 0
            first = self.back + block.offset + lack
            of_groups = part[:, first : first + self.tokens - lack].unflatten(-1, (groups, -1))
            place[:, :, lack:].copy_(of_groups.permute(2, 0, 1, 3))
        return x.flatten(1, 2)

    def _neighbours(self, blocks: tuple[Block, ...]) -> slice | None:
        """Where blocks lie side by side already, if they do."""
        if not all(block.is_source and not block.offset for block in blocks):
            return None
        places = [self._places[block.layer, block.kind] for block in blocks]
        if places != list(range(places[0], places[0] + len(places))):
            return None
        return slice(places[0] * self._width, (places[-1] + 1) * self._width)


class Mapper:
    """A map ready to run on a device: target layers that read the same blocks are one matrix product, and so are
    the layers of trunks that read the same blocks.

    Whoever wants a cache that the target can go on from calls ``kvxfer.handoff.transfer``, which knows positions, what
    the map reads and the plan; ``map`` and ``content`` are for work in content space (training, content errors).

    Args:
        cache_map: the map.
        device: where it runs.
        dtype: of the products (``kvxfer.maps.products`` knows the fastest that does no harm).
        pair: needed by a map that reads what the target knows of a token.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        pair: Pair | None = None,
    ) -> None:
        self.pair, self.extras, self.dtype = pair, cache_map.extras, dtype
        self.random = None if cache_map.random is None else cache_map.random.to(device, dtype)
        shared: dict[tuple[tuple[Block, ...], int, int, bool], dict[Output, LinearLayer]] = {}
        for output, layer in cache_map.layers.items():
            if layer.blocks:
                form = (layer.blocks, layer.groups, layer.weight.shape[-1], layer.right is None)
                shared.setdefault(form, {})[output] = layer
        self.products = [_Product.of(layers, device, dtype) for layers in shared.values()]
        self.trunks = [_Trunks.of(trunks, device, dtype) for trunks in _alike(cache_map.trunks)]
        self.constant = {
            output: layer.bias.to(device, dtype) for output, layer in cache_map.layers.items() if not layer.blocks
        }
        """What outputs without a linear part are but for their trunks."""
        self.layers = 1 + max(layer for layer, _ in cache_map.layers)
        self.lookback = max((-block.offset for block in cache_map.blocks), default=0)
        """How many tokens before a token the map reads."""
        self.needs_hidden = any(block.kind == "source_hidden" for block in self.extras)
        """Whether the map reads the source's final hidden states."""
        self.read = {place: n for n, place in enumerate(_read(cache_map, [*self.products, *self.trunks]))}
        """The source's layers and kinds that the map reads, in the order in which products do."""
        self._widest = cache_map.width * (len(self.read) + len(cache_map.layers))
        """Numbers that a token takes in a chunk, nearly."""
        self.like = torch.empty(0, device=device, dtype=dtype)

    @torch.inference_mode()
    def map(self, content: KV, ids: Int[Tensor, "batch tokens"] | None = None) -> KV:
        """The target's content of every token of the source's content (both ``[batch, heads, tokens, dim]``).

        Float32, or the products' dtype where that is finer.

        Args:
            ids: the tokens themselves, needed by a map that reads what the target knows of them.
        """
        return self._mapped(content, self.known(ids))

    def content(self, source: KV, known: TargetTokens) -> KV:
        """The same where what the target knows of the tokens has been computed already, and in the caller's mode.

        Within ``torch.no_grad()`` it gives tensors that a training step can go on with, which ``map``'s are not. No
        gradient goes through it: ``source`` must not ask for one.
        """
        return self._mapped(source, known.part)

    def _mapped(self, source: KV, known: Known) -> KV:
        dtype, like = torch.promote_types(self.dtype, torch.float32), source.keys[0]
        keys, values = ([torch.empty_like(like, dtype=dtype) for _ in range(self.layers)] for _ in range(2))
        found = KV(keys, values)
        self.run(Views.of(source), Views.of(found), known)
        return found

    def known(self, ids: Int[Tensor, "batch tokens"] | None) -> Known:
        """What the target knows of tokens, computed when a chunk asks for it."""
        pair = self.pair
        if pair is None or ids is None:
            return lambda rows, tokens: TargetTokens(None, None)
        return lambda rows, tokens: TargetTokens.of(pair, ids[rows, tokens], self.extras)

    def run(
        self,
        source: Views,
        target: Views,
        known: Known,
        first: int = 0,
        real: Bool[Tensor, "batch tokens"] | None = None,
        watch: Callable[[], None] = unwatched,
    ) -> None:
        """Write what the map gives of the source's tokens from ``first`` on; those before it are only looked back at.

        Args:
            source: all tokens from a row's start, or from as many before ``first`` as the map looks back.
            target: as many tokens as the source has from ``first`` on.
            known: of the source's rows and tokens.
            real: which of the source's tokens are a row's own; the others are padding, of which nothing is read.
            watch: called before every chunk; what it raises ends the pass.
        """
        batch, tokens = source.keys[0].shape[:2]
        for rows, span in self._chunks(batch, first, tokens):
            watch()
            columns = _Columns(self, source, known, real, (rows, span))
            there = slice(span.start - first, span.stop - first)
            turn = target.turn(rows, there)
            for (layer, kind), part in self._outputs(columns, target.keys[0].shape[2:]):
                target.put(kind, layer, rows, there, turn, part)

    def _chunks(self, batch: int, first: int, tokens: int) -> Iterator[Chunk]:
        """Rows and tokens that are mapped at once."""
        kind = self.like.device.type
        room = _BYTES.get(kind, _MORE_BYTES) // (self.like.itemsize * self._widest)
        most = max(1, min(_TOKENS.get(kind, _MORE_TOKENS), room))
        length = max(tokens - first, 1)
        length = math.ceil(length / math.ceil(length / most))  # chunks of one size
        rows = max(1, most // length)
        for row in range(0, batch, rows):
            for start in range(first, tokens, length):
                yield slice(row, min(row + rows, batch)), slice(start, min(start + length, tokens))

    def _outputs(
        self, columns: _Columns, shape: torch.Size
    ) -> Iterator[tuple[Output, Float[Tensor, "rows tokens heads dim"]]]:
        """Every output's content of a chunk, each to be taken before the next is asked for."""
        here = (columns.rows, columns.tokens)
        added: dict[Output, Tensor] = {}
        for trunks in self.trunks:
            for output, part in trunks.run(columns.design(trunks.blocks, 1)):
                part = part.view(*here, *shape)
                added[output] = added[output] + part if output in added else part
        for output, bias in self.constant.items():
            own = bias.view(*shape).expand(*here, *shape)
            yield output, own + added[output] if output in added else own
        for product in self.products:
            y = product.run(columns.design(product.blocks, product.groups))
            y = y.unflatten(-1, (-1, shape[1])).unflatten(1, here).permute(3, 1, 2, 0, 4, 5).flatten(3, 4)
            for output, part in zip(product.outputs, y, strict=True):
                yield output, part + added[output] if output in added else part


def _read(cache_map: CacheMap, parts: list[_Product | _Trunks]) -> list[tuple[int, str]]:
    """The source's layers and kinds that something reads, by first reader: a design's own are neighbours."""
    blocks = [block for part in parts for block in part.blocks if block.is_source]
    if any(block.kind in RANDOM for block in cache_map.extras) and cache_map.random is not None:
        blocks += cache_map.random.inputs
    return list(dict.fromkeys((block.layer, block.kind) for block in blocks))


def _alike(trunks: tuple[Trunk, ...]) -> list[list[Trunk]]:
    """Trunks by what makes them one batched product."""
    groups: dict[Any, list[Trunk]] = {}
    for trunk in trunks:
        hidden = tuple(weight.shape[1] for weight in trunk.weights)
        groups.setdefault((trunk.blocks, hidden, trunk.activation, len(trunk.readouts)), []).append(trunk)
    return list(groups.values())
