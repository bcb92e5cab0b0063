"""Free decoding under several conditions: what each writes, and how far its predictions are from the ceiling's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvxfer.evals.conditions import Prepared, prefix_conditions
from kvxfer.evals.items import Item
from kvxfer.handoff.transfer import Transfer
from kvxfer.models.pair import Pair

CONDITIONS = ("ceiling", "source", "mapped", "floor")
"""Who decodes. The ceiling comes first: the others are compared with what it writes."""


@dataclass(frozen=True)
class Decoded:
    """What was written under one condition, and how it compares with the ceiling.

    Attributes:
        tokens: the greedy continuation.
        samples: sampled ones.
        kl: KL divergence, in nats, of the next-token distribution from the ceiling's, along the ceiling's own greedy
            tokens: at every step both have read the same.
        top: whether the largest logit is the ceiling's token there.
    """

    tokens: Int64[np.ndarray, "items steps"]
    samples: Int64[np.ndarray, "items samples steps"]
    kl: Float[np.ndarray, "items steps"]
    top: Bool[np.ndarray, "items steps"]


def gumbel(seed: int, items: Sequence[Item], sample: int, steps: int, width: int) -> Float[Tensor, "items steps width"]:
    """Gumbel noise that depends on the seed, the item and the sample alone: every condition has the same luck."""
    rows = []
    for item in items:
        digest = hashlib.sha256(f"{seed}/{item.id}/{sample}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty(steps, width, dtype=torch.float64).exponential_(generator=generator)
        rows.append(-drawn.log().float())
    return torch.stack(rows)


@dataclass(frozen=True)
class Decoder:
    """How it is decoded: so many tokens, greedily and in so many samples at a temperature."""

    steps: int
    samples: int
    temperature: float
    seed: int

    @torch.inference_mode()
    def decode(
        self,
        transfer: Transfer,
        items: Sequence[Item],
        batch_size: int,
        advance: Callable[[int], None],
    ) -> dict[str, Decoded]:
        """Every item under every condition, in the order of ``items``."""
        order: list[int] = []
        parts: dict[str, list[Decoded]] = {name: [] for name in CONDITIONS}
        for chosen in _slices(items, batch_size):
            batch = [items[n] for n in chosen]
            for name, decoded in self._batch(transfer.pair, _prepared(transfer, batch), batch).items():
                parts[name].append(decoded)
            order += chosen
            advance(len(chosen))
        back = np.argsort(np.array(order))
        fields = ("tokens", "samples", "kl", "top")
        return {
            name: Decoded(*(np.concatenate([getattr(part, field) for part in found])[back] for field in fields))
            for name, found in parts.items()
        }

    def _batch(self, pair: Pair, prepared: dict[str, Prepared], batch: Sequence[Item]) -> dict[str, Decoded]:
        widths = (pair.source.geometry.vocabulary, pair.target.geometry.vocabulary)
        greedy = {name: p.model.generate(p.tail, p.past, self.steps).cpu() for name, p in prepared.items()}
        sampled: dict[str, list[Tensor]] = {name: [] for name in prepared}
        for sample in range(self.samples):
            noise = self.temperature * gumbel(self.seed, batch, sample, self.steps, max(widths))

            def lucky(p: Prepared, noise: Tensor = noise) -> Tensor:
                width = p.model.geometry.vocabulary
                return p.model.generate(p.tail, p.past, self.steps, noise=lambda step: noise[:, step, :width]).cpu()

            for name, p in prepared.items():
                sampled[name].append(lucky(p))
        wanted = greedy["ceiling"]
        ceiling = _log_probabilities(prepared["ceiling"], wanted, min(widths))
        found = {}
        for name, p in prepared.items():
            own = ceiling if name == "ceiling" else _log_probabilities(p, wanted, min(widths))
            kl = (ceiling.exp() * (ceiling - own)).sum(-1).clamp_min(0)
            drawn = torch.stack(sampled[name], dim=1) if self.samples else torch.zeros(len(batch), 0, self.steps).long()
            top = own.argmax(-1).cpu() == wanted
            found[name] = Decoded(greedy[name].numpy(), drawn.numpy(), kl.cpu().double().numpy(), top.numpy())
        return found


def _slices(items: Sequence[Item], size: int) -> Iterator[list[int]]:
    """Places of items whose prompts are equally long."""
    lengths: dict[int, list[int]] = {}
    for n, item in enumerate(items):
        lengths.setdefault(len(item.prompt), []).append(n)
    for group in lengths.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _prepared(transfer: Transfer, batch: Sequence[Item]) -> dict[str, Prepared]:
    """Caches of the prompts less the held-back tokens, also where a model has them of its own: all decode from them."""
    found = prefix_conditions(transfer, torch.tensor([item.prompt for item in batch]))
    return {name: found[name] for name in CONDITIONS}


def _log_probabilities(
    prepared: Prepared, tokens: Int64[Tensor, "batch steps"], width: int
) -> Float[Tensor, "batch steps width"]:
    """What the condition says of each token, having read those before it; of the words that both models have."""
    ids = torch.cat([prepared.tail, tokens[:, :-1]], dim=1)
    logits = prepared.model.logits(ids, prepared.past, tokens.shape[1])[..., :width]
    return torch.log_softmax(logits, dim=-1)
