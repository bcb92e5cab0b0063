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


def strip(keys: Keys, cos: Angles, sin: Angles, scaling: float = 1.0) -> Keys:
    """Content keys, in float32, of cached keys: rotated back by their positions and divided by ``scaling``."""
    return _turn(keys, cos / scaling, -sin / scaling)


def restore(keys: Keys, cos: Angles, sin: Angles, scaling: float = 1.0) -> Keys:
    """Cached keys, in float32, of content keys: rotated to their positions and multiplied by ``scaling``."""
    return _turn(keys, cos * scaling, sin * scaling)


def _turn(keys: Keys, cos: Angles, sin: Angles) -> Keys:
    """The rotation of the first ``rotary_dim`` columns; the rest pass through."""
    keys = keys.float()
    width = cos.shape[-1]
    turned, still = keys[..., :width], keys[..., width:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
