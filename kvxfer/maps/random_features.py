"""Random features of all calibrated source layers: drawn once, stored with the calibration and in every map of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import KINDS, Block

_AGAIN = "calibrate again (calibrate.py with force=true)"


@dataclass(frozen=True)
class RandomRelu:
    """Random ReLU features ``relu(x weight + bias)``.

    Weights are standard normal over the square root of the inputs, biases normal of deviation one half.
    """

    weight: Float[Tensor, "inputs features"]
    bias: Float[Tensor, " features"]

    names: ClassVar = ("relu.weight", "relu.bias")

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[1:] != self.bias.shape:
            raise ValueError("relu.weight does not fit relu.bias")

    @staticmethod
    def draw(inputs: int, features: int) -> RandomRelu:
        """The features of the fixed seed; another torch may draw others."""
        generator = torch.Generator().manual_seed(20260803)
        weight = torch.randn(inputs, features, generator=generator) / inputs**0.5
        return RandomRelu(weight, torch.randn(features, generator=generator) / 2)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight, one per bias."""
        return 2 * self.weight.numel() + self.bias.numel()

    def __call__(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... features"]:
        return torch.relu(x @ self.weight.to(x) + self.bias.to(x))


@dataclass(frozen=True)
class RandomProducts:
    """Random products ``(x left) * (x right)``, a quadratic design: all products of coordinates would be far too many.

    Both factors are standard normal over the square root of the inputs.
    """

    left: Float[Tensor, "inputs features"]
    right: Float[Tensor, "inputs features"]

    names: ClassVar = ("products.left", "products.right")

    def __post_init__(self) -> None:
        if self.left.ndim != 2 or self.left.shape != self.right.shape:
            raise ValueError("products.left does not fit products.right")

    @staticmethod
    def draw(inputs: int, features: int) -> RandomProducts:
        """The features of the fixed seed; another torch may draw others."""
        generator = torch.Generator().manual_seed(20261129)
        left, right = (torch.randn(inputs, features, generator=generator) / inputs**0.5 for _ in range(2))
        return RandomProducts(left, right)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight of either factor, one per product."""
        return 2 * (self.left.numel() + self.right.numel()) + self.left.shape[1]

    def __call__(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... features"]:
        return (x @ self.left.to(x)) * (x @ self.right.to(x))


_FORMS: dict[str, type[RandomRelu | RandomProducts]] = {"random_relu": RandomRelu, "random_products": RandomProducts}


@dataclass(frozen=True)
class RandomFeatures:
    """All random features of a calibration or a map.

    Their inputs are the keys and values of every layer in ``layers`` side by side, each layer's kind divided by its own
    root mean square at the token, so they need no statistics of the data.

    Attributes:
        layers: the source layers that they read, ascending.
        parts: the features of each kind of block; at least one.
    """

    layers: tuple[int, ...]
    parts: Mapping[str, RandomRelu | RandomProducts]

    @staticmethod
    def draw(layers: Sequence[int], width: int, features: Mapping[str, int]) -> RandomFeatures | None:
        """Random features of some source layers, or None if none are asked for: a function of the arguments alone.

        Args:
            width: columns of one source layer's keys.
            features: how many of each random kind.
        """
        inputs = len(layers) * len(KINDS) * width
        parts = {kind: _FORMS[kind].draw(inputs, count) for kind, count in features.items()}
        return RandomFeatures(tuple(layers), parts) if parts else None

    @staticmethod
    def of(tensors: dict[str, Tensor], layers: Iterable[int], width: int) -> RandomFeatures | None:
        """Those of named tensors, which are taken out of the dictionary; None if it has none.

        Args:
            width: columns of one layer's keys.

        Raises:
            ValueError, TypeError: the weights do not fit each other, ``layers`` or ``width``.
        """
        parts = {}
        for kind, form in _FORMS.items():
            if given := [tensors.pop(name) for name in form.names if name in tensors]:
                parts[kind] = form(*given)
        found = RandomFeatures(tuple(layers), parts)
        fit = all(len(part.tensors[0]) == width * len(found.inputs) for part in parts.values())
        if not fit or bool(parts) != bool(found.layers):
            raise ValueError("the weights of random features do not fit random_layers")
        return found if parts else None

    @property
    def inputs(self) -> list[Block]:
        """The source blocks that they read, in the order of their columns."""
        return [Block(layer, kind) for layer in self.layers for kind in KINDS]

    @property
    def widths(self) -> dict[str, int]:
        """Features of each kind of block that is there."""
        return {kind: part.tensors[0].shape[1] for kind, part in self.parts.items()}

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def flops(self) -> int:
        """FLOPs per token, however many target layers read them; the normalisation is left out."""
        return sum(part.flops for part in self.parts.values())

    def to(self, device: str | torch.device, dtype: torch.dtype = torch.float32) -> RandomFeatures:
        """The same features where, and in the dtype in which, they are computed."""
        moved = {
            kind: _FORMS[kind](*(tensor.to(device, dtype) for tensor in part.tensors))
            for kind, part in self.parts.items()
        }
        return RandomFeatures(self.layers, moved)

    def only(self, kinds: Container[str]) -> RandomFeatures | None:
        """Those of some kinds of block, or None if that leaves none."""
        parts = {kind: part for kind, part in self.parts.items() if kind in kinds}
        return RandomFeatures(self.layers, parts) if parts else None

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in files."""
        return {
            name: tensor for part in self.parts.values() for name, tensor in zip(part.names, part.tensors, strict=True)
        }


def random_columns(
    random: RandomFeatures | None, block: Block, read: Callable[[Block], Float[Tensor, "... width"]]
) -> Float[Tensor, "... features"]:
    """The columns of a random block; ``read`` gives those of a source block at the same tokens.

    Raises:
        KvxferError: ``random`` has no such features.
    """
    if random is None or block.kind not in random.parts:
        raise KvxferError(f"the weights of {block.name} are missing: {_AGAIN}, then train")
    parts = [read(part) for part in random.inputs]
    scaled = [x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6) for x in parts]
    return random.parts[block.kind](torch.cat(scaled, dim=-1))
