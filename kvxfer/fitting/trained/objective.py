"""What a trained map is trained on: attention outputs, next-token distributions and content, mapped against true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div, log_softmax, scaled_dot_product_attention

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.activations import Activations
from kvxfer.fitting.trained.measures import Measures, Spread
from kvxfer.fitting.trained.specs import Trained
from kvxfer.models import rope
from kvxfer.models.hf.observing import TRAINED_INSTEAD, Followed
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

Outputs = Float[Tensor, "rows tokens hidden"]
Columns = Float[Tensor, "rows tokens width"]


@dataclass(frozen=True)
class Losses:
    """The terms of the loss that have a weight, each per part.

    Attributes:
        attention: by trained layer, the error of the attention output as a share of its variance.
        kl: nats per token of the continuation.
        mse: the error of content as a share of its variance: layer by layer, keys before values.
    """

    attention: Float[Tensor, " layers"] | None
    kl: Float[Tensor, ""] | None
    mse: Float[Tensor, " outputs"] | None


class Objective:
    """The loss of :class:`kvxfer.fitting.trained.specs.Trained` on batches of a pair, and what validation measures.

    All is computed in float32 (the target's own forward in its dtype) whatever autocast says.

    Args:
        exact: how many first tokens of a row are always the target's own (``corpus.skip_first``). Nothing of them is
            counted.
    """

    def __init__(self, pair: Pair, spec: Trained, exact: int) -> None:
        available = pair.target.geometry.layers
        self.layers = tuple(range(available)) if spec.layers is None else spec.layers
        """The target layers whose attention outputs and content count."""
        if self.layers[-1] >= available:
            has = f"{pair.target.name} has layers 0 to {available - 1}"
            raise KvxferError(f"solver.layers={list(self.layers)}: {has}; choose of these")
        self.pair, self.spec, self.exact = pair, spec, exact
        self.scales = [scale for _, scale in pair.target.attention_outputs(TRAINED_INSTEAD)]

    def losses(self, batch: Activations, mapped: KV, split: int) -> Losses:
        """The loss of a batch, with gradients to ``mapped``.

        Args:
            mapped: the content that the map gives for all of the row.
            split: where the prefix ends and the continuation begins.
        """
        with torch.autocast(batch.ids.device.type, enabled=False):
            cache = self._cache(batch, mapped, split)
            followed = self._followed(batch, cache, split) if self.spec.follows else None
            return Losses(
                self._attention(batch, cache, split, followed) if self.spec.attention else None,
                _divergence(batch, followed, split) if self.spec.kl else None,
                self._content(batch, mapped) if self.spec.mse else None,
            )

    def total(self, losses: Losses) -> Float[Tensor, ""]:
        """The weighted sum of the terms' means."""
        weighted = ((self.spec.attention, losses.attention), (self.spec.kl, losses.kl), (self.spec.mse, losses.mse))
        return torch.stack([weight * term.mean() for weight, term in weighted if term is not None]).sum()

    @torch.no_grad()
    def measures(self, batch: Activations, mapped: KV, split: int) -> Measures:
        """What the mapped cache is worth in every layer, trained or not; ``batch`` needs logits."""
        layers = range(len(batch.keys))
        with torch.autocast(batch.ids.device.type, enabled=False):
            cache = self._cache(batch, mapped, split)
            kl = _divergence(batch, self._followed(batch, cache, split), split)
            handed, true = self._handed(batch, cache, split), [x[:, split:] for x in batch.attention]
            cosines = [cosine_similarity(self._output(batch, handed, n, split), true[n], dim=-1) for n in layers]
            return Measures(
                tokens=cosines[0].numel(),
                kl=float(kl),
                cosine=torch.stack([each.double().mean().cpu() for each in cosines]),
                attention=Spread.of(
                    [x[:, self.exact :] for x in batch.attention],
                    [self._output(batch, cache, n, self.exact) for n in layers],
                ),
            )

    def _cache(self, batch: Activations, mapped: KV, split: int) -> KV:
        """The row's rotated cache, float32: the target's own exact tokens, and the mapped ones."""
        tokens = batch.ids.shape[1]
        self.pair.check_length(tokens, "corpus.length")
        if not self.exact < split < tokens:
            raise KvxferError(
                f"a prefix of {split} of corpus.length={tokens} tokens, corpus.skip_first={self.exact} of them exact, "
                "leaves nothing mapped or nothing that follows: raise corpus.length or lower corpus.skip_first"
            )
        found = KV([x.float() for x in mapped.keys], [x.float() for x in mapped.values])
        return self._rotated(found.starting_with(_own(batch).span(0, self.exact)))

    def _rotated(self, content: KV) -> KV:
        cos, sin = (angles.to(content.keys[0].device) for angles in self.pair.target.cos_sin(content.tokens))
        scaling = self.pair.target.geometry.rotary.scaling
        return KV([rope.restore(keys, cos, sin, scaling) for keys in content.keys], content.values)

    def _handed(self, batch: Activations, cache: KV, split: int) -> KV:
        """The cache with the continuation's own keys and values."""
        return self._rotated(_own(batch)).starting_with(cache.span(0, split))

    def _followed(self, batch: Activations, cache: KV, split: int) -> Followed:
        """What the target makes of the continuation over the mapped prefix."""
        return self.pair.target.follow(batch.ids[:, split:], cache.span(0, split))

    def _output(self, batch: Activations, cache: KV, layer: int, first: int) -> Outputs:
        """A layer's attention output over a rotated cache, of the target's own queries from token ``first`` on."""
        queries, keys, values = batch.queries[layer][:, :, first:], cache.keys[layer], cache.values[layer]
        position = torch.arange(cache.tokens, device=queries.device)
        # No kernel that is sparing of memory takes float32 and grouped heads together.
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        heads = scaled_dot_product_attention(
            queries, keys, values, attn_mask=position <= position[first:, None], scale=self.scales[layer]
        )
        return self.pair.target.project(layer, heads.transpose(1, 2).flatten(2))

    def _attention(
        self, batch: Activations, cache: KV, split: int, followed: Followed | None
    ) -> Float[Tensor, " layers"]:
        if self.spec.carried and followed is not None:
            found = [followed.attention[layer].float() for layer in self.layers]
            return self._shares(batch, found, split)
        asked = []
        if self.spec.queries != "continuation":
            found = [self._output(batch, cache, layer, self.exact) for layer in self.layers]
            asked.append(self._shares(batch, found, self.exact))
        if self.spec.queries != "prefix":
            handed = self._handed(batch, cache, split)
            found = [self._output(batch, handed, layer, split) for layer in self.layers]
            asked.append(self._shares(batch, found, split))
        return torch.stack(asked).mean(0)

    def _shares(self, batch: Activations, found: list[Outputs], first: int) -> Float[Tensor, " layers"]:
        true = [batch.attention[layer][:, first:] for layer in self.layers]
        return torch.stack([_share(*both) for both in zip(true, found, strict=True)])

    def _content(self, batch: Activations, mapped: KV) -> Float[Tensor, " outputs"]:
        true, found = (_columns(kv, self.layers, self.exact) for kv in (_own(batch), mapped))
        return torch.stack([_share(mine, theirs.float()) for mine, theirs in zip(true, found, strict=True)])


def _own(batch: Activations) -> KV:
    """The target's own content."""
    return KV(batch.keys, batch.values)


def _columns(content: KV, layers: Sequence[int], first: int) -> list[Columns]:
    """Keys and values of layers, all heads side by side, from token ``first`` on."""
    both = [kind[layer] for layer in layers for kind in (content.keys, content.values)]
    return [x[:, :, first:].transpose(1, 2).flatten(2) for x in both]


def _share(true: Columns, found: Columns) -> Float[Tensor, ""]:
    """Squared error over the truth's squared deviation from its mean over tokens; 1 where it does not vary."""
    total = (true - true.mean((0, 1))).square().sum()
    share = (found - true).square().sum() / torch.where(total > 0, total, 1)
    return torch.where(total > 0, share, 1)


def _divergence(batch: Activations, followed: Followed | None, split: int) -> Float[Tensor, ""]:
    """KL(target || mapped) of the distributions after each token of the continuation, nats per token."""
    if batch.logits is None or followed is None:
        raise ValueError("the target's logits, and its forward over the mapped prefix, are needed for a divergence")
    true, found = (log_softmax(logits.float(), dim=-1) for logits in (batch.logits[:, split:], followed.logits))
    return kl_div(found, true, log_target=True, reduction="sum") / true[..., 0].numel()
