"""What both models make of the rows that a map is trained on, read once where memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block
from kvxfer.maps.columns import TargetTokens, read_source
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair


@dataclass(frozen=True)
class Activations:
    """What both models make of some rows: plain tensors on the target's device, float32 but for the logits.

    Attributes:
        ids: the rows.
        source: the source's content, with its final hidden states where the map reads them.
        known: what the target knows of each token alone, as far as the map reads it.
        own: the target's own content.
        queries: the target's own, rotated and scaled by it, by layer.
        attention: the target's own attention outputs, after the output projection with its bias, by layer.
        logits: the target's own of every token, in its dtype; None unless asked for.
    """

    ids: Int[Tensor, "rows tokens"]
    source: KV
    known: TargetTokens
    own: KV
    queries: list[Float[Tensor, "rows query_heads tokens dim"]]
    attention: list[Float[Tensor, "rows tokens hidden"]]
    logits: Float[Tensor, "rows tokens vocab"] | None


_Read = dict[str, list[Tensor]]
"""What the models gave for rows, as they gave it: caches rotated, in their dtypes; what was not asked for is empty."""


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
            device = self.pair.target.device
            parts = [self._row(row) for row in rows]
            read = {
                name: [torch.cat([x.to(device) for x in same]) for same in zip(*(p[name] for p in parts), strict=True)]
                for name in parts[0]
            }
            layer0 = KV(read["layer0.keys"], read["layer0.values"]) if read["layer0.keys"] else None
            return Activations(
                self.tokens[list(rows)].to(device),
                self.pair.content("source", KV(read["source.keys"], read["source.values"], *read["source.hidden"])),
                TargetTokens(next(iter(read["embeddings"]), None), layer0),
                self.pair.content("target", KV(read["keys"], read["values"])),
                [query.float() for query in read["queries"]],
                [output.float() for output in read["attention"]],
                next(iter(read["logits"]), None),
            )

    def _row(self, row: int) -> _Read:
        if row in self._kept:
            return self._kept[row]
        read = self._read(self.tokens[row : row + 1])
        tensors = list(itertools.chain(*read.values()))
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise KvxferError(
                f"row {row} to train on or to validate with gives values that are not finite: try pair.dtype=float32"
            )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self.used + size <= self.limit:
            # Copies hold nothing else, such as the rest of a tensor that they were a view of.
            self._kept[row] = {name: [x.to("cpu", copy=True) for x in own] for name, own in read.items()}
            self.used += size
        return read

    def _read(self, ids: Int[Tensor, "rows tokens"]) -> _Read:
        source = read_source(self.pair, ids, self.blocks)
        target = self.pair.target.observe(ids, self.logits)
        known = TargetTokens.of(self.pair, ids, self.blocks)
        layer0 = known.layer0 or KV([], [])
        found = {
            "source.keys": source.keys,
            "source.values": source.values,
            "keys": target.kv.keys,
            "values": target.kv.values,
            "queries": target.queries,
            "attention": target.attention,
            "layer0.keys": layer0.keys,
            "layer0.values": layer0.values,
        }
        single = {"source.hidden": source.hidden, "logits": target.logits, "embeddings": known.embeddings}
        return {**found, **{name: [] if x is None else [x] for name, x in single.items()}}
