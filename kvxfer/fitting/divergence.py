"""What maps are worth to the target's next tokens, on a few validation rows that both models read once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from kvxfer.errors import KvxferError
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.columns import read_source
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

ROWS, TOKENS = 16, 64
"""Rows that are read at most, and tokens of each, after its first half, whose next-token distributions count."""


class _Read(NamedTuple):
    """Some rows: their tokens, the source's content of the prefix, the target's own first tokens and distributions."""

    ids: Int64[Tensor, "rows tokens"]
    source: KV
    exact: KV
    true: Float[Tensor, "rows scored vocab"]


class Divergence:
    """KL(target || mapped) of the next token, nats per token, where the first half of a row is mapped.

    Args:
        blocks: what maps may read.
        tokens: validation rows.
        exact: how many first tokens of a row are always the target's own (``corpus.skip_first``).
        random: the random features that maps may read.
        batch_size: rows of one forward pass.
    """

    def __init__(
        self,
        pair: Pair,
        blocks: Iterable[Block],
        tokens: Int64[Tensor, "rows length"],
        exact: int,
        random: RandomFeatures | None = None,
        batch_size: int = 8,
    ) -> None:
        rows, length = tokens[:ROWS].shape
        self.pair, self.random, self.cut = pair, random, length // 2
        if not rows or self.cut <= exact:
            raise KvxferError(
                f"solver.criterion=kl reads validation rows and maps the first half of each, and there are {rows} of "
                f"corpus.length={length}, corpus.skip_first={exact} tokens of them exact: raise corpus.rows.validation "
                "or corpus.length"
            )
        wanted, device = tuple(blocks), pair.target.device
        batches = tokens[:ROWS, : self.cut + TOKENS].split(batch_size)
        self._read = [self._rows(ids.to(device), wanted, exact) for ids in batches]

    def _rows(self, ids: Int64[Tensor, "rows tokens"], blocks: tuple[Block, ...], exact: int) -> _Read:
        head, target = ids[:, : self.cut], self.pair.target
        source = self.pair.content("source", read_source(self.pair, head, blocks))
        logits = target.logits(ids, keep=ids.shape[1] - self.cut)
        return _Read(ids, source, target.prefill(head).span(0, exact), log_softmax(logits, dim=-1))

    @torch.inference_mode()
    def __call__(self, layers: dict[Output, LinearLayer]) -> float:
        """Of a map's layers; its products run in float32."""
        mapper = Mapper(CacheMap(layers, {}, self.random), self.pair.target.device, pair=self.pair)
        total, count = 0.0, 0
        for read in self._read:
            mapped = mapper.map(read.source, read.ids[:, : self.cut])
            cache = self.pair.rotated("target", mapped).starting_with(read.exact)
            found = log_softmax(self.pair.target.logits(read.ids[:, self.cut :], cache), dim=-1)
            total += float(kl_div(found, read.true, log_target=True, reduction="sum"))
            count += read.true[..., 0].numel()
        return total / count
