"""How much each token matters to a target layer: what its own attention gives the token, against an even share.

The idea of weighing a regression's tokens by the receiver's attention is that of CacheBridge's attention repair
(arXiv 2609.00891). Ours is simpler: one fixed weight per token and target layer, pooled over query heads and clipped,
in one closed-form solve.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def attention_received(
    queries: Float[Tensor, "batch query_heads tokens dim"],
    keys: Float[Tensor, "batch kv_heads tokens dim"],
    scale: float,
) -> Float[Tensor, "batch tokens"]:
    """The attention that later tokens give each token, 1 where they look at all that they see alike.

    For token j the mean, over query heads and over the tokens i > j of the row, of the attention probability p[i, j]
    times the i + 1 tokens that i sees. A token's look at itself is left out: a mapped key or value is read by later
    tokens only. Nothing later looks at the last token, which counts 1.

    Args:
        queries: one layer's, as its attention sees them (rotated).
        keys: that layer's cached keys (rotated).
        scale: what the model multiplies products of both with before the softmax.
    """
    batch, tokens = keys.shape[0], keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    device = keys.device
    seen = torch.arange(1, tokens + 1, device=device, dtype=torch.float32)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(-1)
    masked = torch.ones_like(later).triu(1)
    total = torch.zeros(batch, tokens, device=device)
    # KV head by KV head: no tensor of all heads' probabilities.
    for head in range(keys.shape[1]):
        own = queries[:, head * group : (head + 1) * group].float()
        scores = own @ keys[:, head, None].float().mT * scale
        shares = scores.masked_fill_(masked, -torch.inf).softmax(-1).sum(1)
        total += (shares * seen[:, None]).masked_fill_(~later, 0.0).sum(1)
    readers = (tokens - seen).clamp_min(1)
    received = total / (queries.shape[1] * readers)
    received[:, -1] = 1.0
    return received


def token_weights(
    received: Float[Tensor, "batch tokens"], kept: Int[Tensor, " kept"], clip: float
) -> Float[Tensor, "batch kept"]:
    """Weights of a row's kept tokens: clipped above at ``clip`` times their median, then scaled to a mean of 1.

    Clipping keeps the tokens that attention parks on (sinks) from ruling the fit.
    """
    received = received[:, kept.to(received.device)].cpu().double()
    clipped = received.minimum(clip * received.median(dim=1, keepdim=True).values)
    mean = clipped.mean(dim=1, keepdim=True)
    # Where most tokens get no attention at all, the clipped weights say nothing.
    return torch.where(mean > 0, clipped / mean, 1.0)
