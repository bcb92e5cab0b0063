"""Keys in and out of content space: the rotary embedding taken off and put back, with a model's own cos and sin.

A cached key is ``s * R(p) k`` on its first ``rotary_dim`` columns and ``k`` on the rest: R(p) turns column i with
column i + rotary_dim / 2 by the angle of position p (the half-split layout), and s is the attention scaling (YaRN;
else 1). cos and sin are given without s, so R is a rotation and its inverse is its transpose.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Keys = Float[Tensor, "batch heads tokens dim"]
Angles = Float[Tensor, "tokens rotary_dim"]

_TILE = 1 << 18
"""Numbers that a CPU turns at once: what the passes leave for each other stays near its cores."""


def strip(keys: Keys, cos: Angles, sin: Angles, scaling: float = 1.0) -> Keys:
    """Content keys, in float32, of cached keys: rotated back by their positions and divided by ``scaling``."""
    return _turn(keys, *stripping(cos, sin, scaling))


def restore(keys: Keys, cos: Angles, sin: Angles, scaling: float = 1.0) -> Keys:
    """Cached keys, in float32, of content keys: rotated to their positions and multiplied by ``scaling``."""
    return _turn(keys, *restoring(cos, sin, scaling))


def stripping(cos: Tensor, sin: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The angles by which keys are stripped: tensors of their own, whose gradients a training may ask for."""
    return cos / scaling, -sin / scaling


def restoring(cos: Tensor, sin: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The angles by which keys are restored, likewise."""
    return cos * scaling, sin * scaling


def turn_into(
    out: Float[Tensor, "batch tokens heads dim"],
    keys: Float[Tensor, "batch tokens heads dim"],
    cos: Float[Tensor, "#batch tokens 1 rotary_dim"],
    sin: Float[Tensor, "#batch tokens 1 rotary_dim"],
) -> None:
    """Write turned keys where they belong: what ``strip`` and ``restore`` give, without their copies or a gradient.

    Both may be views of any layout and dtype, but not of the same memory; it is computed in float32.
    """
    batch, tokens, heads, dim = keys.shape
    step = max(1, tokens) if keys.device.type != "cpu" else max(1, _TILE // max(1, batch * heads * dim))
    by_head = out.stride(1) < out.stride(2)  # what lies between the passes lies as the result does
    shape = (batch, heads, min(step, tokens), dim) if by_head else (batch, min(step, tokens), heads, dim)
    before, turned = torch.empty((2, *shape), dtype=torch.float32, device=keys.device)
    width, half, axis = cos.shape[-1], cos.shape[-1] // 2, 2 if by_head else 1
    if by_head:
        out, keys, cos, sin = (x.transpose(1, 2) for x in (out, keys, cos, sin))
    for start in range(0, tokens, step):
        place, x, c, s = (each.narrow(axis, start, min(step, tokens - start)) for each in (out, keys, cos, sin))
        a, b = (each.narrow(axis, 0, x.shape[axis])[..., :width] for each in (before, turned))
        a.copy_(x[..., :width])
        torch.mul(a, c, out=b)
        b[..., :half].addcmul_(a[..., half:], s[..., :half], value=-1)
        b[..., half:].addcmul_(a[..., :half], s[..., half:])
        place[..., :width].copy_(b)
        if width < dim:
            place[..., width:].copy_(x[..., width:])


def _turn(keys: Keys, cos: Angles, sin: Angles) -> Keys:
    """The rotation of the first ``rotary_dim`` columns; the rest pass through."""
    keys = keys.float()
    width = cos.shape[-1]
    turned, still = keys[..., :width], keys[..., width:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
