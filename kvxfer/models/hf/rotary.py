"""cos and sin from a model's own rotary module, so that no formula is written twice."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvxfer.errors import KvxferError


def find_rotary(body: nn.Module, name: str) -> Any:
    """The one rotary module of a decoder; none, or one that gives no cos and sin, is refused."""
    rotary = getattr(body, "rotary_emb", None)
    if rotary is None or not hasattr(rotary, "inv_freq") or not hasattr(rotary, "attention_scaling"):
        raise KvxferError(f"{name}: no rotary module that all layers share (rotary type none); pairs need rotary keys")
    return rotary


@torch.inference_mode()
def cos_sin(
    rotary: Any, tokens: int, start: int, device: torch.device
) -> tuple[Float[Tensor, "tokens rotary_dim"], Float[Tensor, "tokens rotary_dim"]]:
    """cos and sin of positions ``start`` to ``start + tokens``, float32, without the attention scaling."""
    positions = torch.arange(start, start + tokens, device=device)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    return cos[0] / rotary.attention_scaling, sin[0] / rotary.attention_scaling
