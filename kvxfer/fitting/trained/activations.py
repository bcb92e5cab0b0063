"""What both models make of the rows that a map is trained on, read once where memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block
from kvxfer.maps.columns import TargetTokens, read_source
from kvxfer.models.hf.observing import Observed
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.pair import Pair


@dataclass(frozen=True)
class Activations:
    """What both models make of some rows: plain tensors on the target's device, float32 but for the logits.

    Attributes:
        ids: the rows.
        source: the source's content, with its final hidden states where the map reads them.
        known: what the target knows of each token alone, as far as the map reads it.
        keys, values: the target's own content, by layer.
        queries: the target's own, rotated and scaled by it, by layer.
        attention: the target's own attention outputs, after the output projection with its bias, by layer.
        logits: the target's own of every token, in its dtype; None unless asked for.
    """

    ids: Int[Tensor, "rows tokens"]
    source: KV
    known: TargetTokens
    keys: LayerTensors
    values: LayerTensors
    queries: list[Float[Tensor, "rows query_heads tokens dim"]]
    attention: list[Float[Tensor, "rows tokens hidden"]]
    logits: Float[Tensor, "rows tokens vocab"] | None


@dataclass(frozen=True)
class _Read:
    """What the models gave for rows, as they gave it: caches rotated and in their dtypes."""

    source: KV
    target: Observed
    known: TargetTokens

    def tensors(self) -> Iterator[Tensor]:
        known = self.known.layer0
        for kv in (self.source, self.target.kv, *([] if known is None else [known])):
            yield from (*kv.keys, *kv.values)
        yield from (*self.target.queries, *self.target.attention)
        for tensor in (self.source.hidden, self.target.logits, self.known.embeddings):
            if tensor is not None:
                yield tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def kept(self) -> _Read:
        """A copy in the CPU's memory that holds nothing else, such as the rest of a tensor that it was a view of."""
        return _joined([self], lambda tensors: tensors[0].to("cpu", copy=True))


class ActivationStore:
    """Rows as both models see them. Rows that come first are kept in the CPU's memory, the rest is read each time.

    Every row is read by itself, so that what it gives depends neither on its batch nor on what is kept.

    Args:
        blocks: what the map reads.
        tokens: all rows.
        cache_gib: how much memory the kept rows may take, in GiB.
        logits: whether the target's logits are wanted.
    """

    def __init__(
        self,
        pair: Pair,
        blocks: set[Block],
        tokens: Int64[Tensor, "rows length"],
        cache_gib: float,
        logits: bool,
    ) -> None:
        pair.check_length(tokens.shape[1], "corpus.length")
        self.pair, self.tokens, self.logits = pair, tokens, logits
        self.blocks = tuple(sorted(blocks))
        self.limit, self.used = int(cache_gib * 2**30), 0
        self._kept: dict[int, _Read] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def kept(self) -> int:
        """How many rows are in memory."""
        return len(self._kept)

    def forget(self) -> None:
        """Keep nothing: what is asked for again is read again."""
        self._kept.clear()
        self.used = 0

    def batch(self, rows: Sequence[int]) -> Activations:
        """Some rows, in this order.

        Raises:
            KvxferError: a model gives a value that is not finite.
        """
        # Lightning validates in inference mode, whose tensors are of no use to a step with gradients.
        with torch.inference_mode(False), torch.no_grad():
            ids = self.tokens[list(rows)].to(self.pair.target.device)
            return self._activations(ids, _joined([self._row(row) for row in rows], self._together))

    def _together(self, tensors: list[Tensor]) -> Tensor:
        """One tensor of rows' tensors, on the target's device."""
        return torch.cat([tensor.to(self.pair.target.device) for tensor in tensors])

    def _row(self, row: int) -> _Read:
        if row in self._kept:
            return self._kept[row]
        ids = self.tokens[row : row + 1]
        source = read_source(self.pair, ids, self.blocks)
        target = self.pair.target.observe(ids, self.logits)
        read = _Read(source, target, TargetTokens.of(self.pair, ids, self.blocks))
        if not all(bool(torch.isfinite(tensor).all()) for tensor in read.tensors()):
            raise KvxferError(
                f"row {row} to train on or to validate with gives values that are not finite: try pair.dtype=float32"
            )
        if self.used + read.bytes <= self.limit:
            self._kept[row] = read.kept()
            self.used += read.bytes
        return read

    def _activations(self, ids: Int[Tensor, "rows tokens"], read: _Read) -> Activations:
        own = self.pair.content("target", read.target.kv)
        source = self.pair.content("source", read.source)
        return Activations(
            ids,
            source,
            read.known,
            own.keys,
            own.values,
            [query.float() for query in read.target.queries],
            [output.float() for output in read.target.attention],
            read.target.logits,
        )


def _joined(parts: list[_Read], join: Callable[[list[Tensor]], Tensor]) -> _Read:
    """One of several, each tensor by ``join`` of theirs."""

    def one(tensors: Iterable[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return join(found) if found else None

    def layers(lists: Iterable[list[Tensor]]) -> list[Tensor]:
        return [join(list(tensors)) for tensors in zip(*lists, strict=True)]

    def cache(kvs: list[KV]) -> KV:
        return KV(layers(kv.keys for kv in kvs), layers(kv.values for kv in kvs), one(kv.hidden for kv in kvs))

    targets = [part.target for part in parts]
    observed = Observed(
        cache([target.kv for target in targets]),
        layers(target.queries for target in targets),
        layers(target.attention for target in targets),
        one(target.logits for target in targets),
    )
    layer0 = [part.known.layer0 for part in parts if part.known.layer0 is not None]
    known = TargetTokens(one(part.known.embeddings for part in parts), cache(layer0) if layer0 else None)
    return _Read(cache([part.source for part in parts]), observed, known)
