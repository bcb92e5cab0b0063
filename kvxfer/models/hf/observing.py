"""What a model's attention is made of and gives: softmax scales, output projections, and their outputs as they pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.kv import KV, LayerTensors

TRAINED_INSTEAD = "solver=ridge or another closed form, which does without"

LayerOutputs = list[Float[Tensor, "batch tokens hidden"]]


@dataclass(frozen=True)
class Observed:
    """A model's own reading of some tokens, all in its dtype.

    Attributes:
        kv: its cache (rotated keys).
        queries: each layer's queries as attention sees them (rotated, scaled by the model).
        attention: each layer's attention output, after its output projection with its bias.
        logits: of every token; None unless asked for.
    """

    kv: KV
    queries: LayerTensors
    attention: LayerOutputs
    logits: Float[Tensor, "batch tokens vocab"] | None


@dataclass(frozen=True)
class Followed:
    """What a model makes of tokens that follow a cache: its logits, float32, and each layer's attention output."""

    logits: Float[Tensor, "batch tokens vocab"]
    attention: LayerOutputs


@contextmanager
def captured_outputs(body: Any, name: str) -> Iterator[dict[int, Tensor]]:
    """Inside the block, a forward of ``body`` leaves what each layer's o_proj gives in the dictionary, by layer."""
    found: dict[int, Tensor] = {}
    output_projections(body, name, TRAINED_INSTEAD)
    hooks = []
    try:
        for number, layer in enumerate(body.layers):

            def keep(module: Any, inputs: Any, output: Tensor, number: int = number) -> None:
                found[number] = output

            hooks.append(layer.self_attn.o_proj.register_forward_hook(keep))
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def output_projections(body: Any, name: str, instead: str) -> list[Any]:
    """Each layer's o_proj; ``instead`` is the setting that does without, for the error."""
    found = []
    for number, layer in enumerate(body.layers):
        projection = getattr(layer.self_attn, "o_proj", None)
        if projection is None:
            raise KvxferError(f"{name}: layer {number} has no o_proj to weigh values by; set {instead}")
        found.append(projection)
    return found
