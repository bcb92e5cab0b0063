"""Random features of all calibrated source layers: drawn once, stored with the calibration and in every map of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import KINDS, RANDOM, Block
from kvxfer.moments.layout import Layout

RANDOM_FILE = "random.safetensors"
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
        """The weights in the order of ``names``."""
        return self.weight, self.bias

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight, one per bias."""
        return 2 * self.weight.numel() + self.bias.numel()

    def __call__(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... features"]:
        """The features of normalised inputs."""
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
        """The weights in the order of ``names``."""
        return self.left, self.right

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight of either factor, one per product."""
        return 2 * (self.left.numel() + self.right.numel()) + self.left.shape[1]

    def __call__(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... features"]:
        """The features of normalised inputs."""
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
    def draw(layout: Layout) -> RandomFeatures | None:
        """The random features of a layout, or None if it keeps none: a function of its layers and widths."""
        layers = tuple(layout.source_layers)
        inputs = len(layers) * len(KINDS) * layout.width
        parts = {kind: _FORMS[kind].draw(inputs, width) for kind, width in _widths(layout).items()}
        return RandomFeatures(layers, parts) if parts else None

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
        """Numbers in the weights."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def flops(self) -> int:
        """FLOPs per token, however many target layers read them; the normalisation is left out."""
        return sum(part.flops for part in self.parts.values())

    def to(self, device: str | torch.device) -> RandomFeatures:
        """The same features where they are computed."""
        moved = {
            kind: _FORMS[kind](*(tensor.to(device) for tensor in part.tensors)) for kind, part in self.parts.items()
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


def keep_random(layout: Layout, path: Path) -> RandomFeatures | None:
    """The random features of a pass: those of its file, or (the first time) drawn and written there."""
    if path.is_file():
        return load_random(layout, path)
    drawn = RandomFeatures.draw(layout)
    if drawn is not None:
        # A pass that is killed while it writes must not find half of it.
        temporary = path.with_name(f".{path.name}.tmp")
        save_file(drawn.tensors(), temporary)
        temporary.replace(path)
    return drawn


def load_random(layout: Layout, path: Path) -> RandomFeatures | None:
    """The random features that a calibration of this layout was made with; None if the layout keeps none.

    Raises:
        KvxferError: the file is missing, unreadable, or another layout's.
    """
    widths = _widths(layout)
    if not widths:
        return None
    tensors = _read(path)
    try:
        found = RandomFeatures.of(tensors, layout.source_layers, layout.width)
    except (ValueError, TypeError) as error:
        raise KvxferError(f"{path} holds other random features than the moments beside it: {_AGAIN}") from error
    if found is None or found.widths != widths:
        raise KvxferError(f"{path} holds other random features than the moments beside it: {_AGAIN}")
    return found


def merge_random(shares: list[Path], path: Path) -> None:
    """Copy the random features of the first share, once those of the others were found to be the same.

    Raises:
        KvxferError: a share has none, or others, as another version of torch may have drawn them.
    """
    first = _read(shares[0])
    for share in shares[1:]:
        other = _read(share)
        if set(other) != set(first) or not all(torch.equal(other[name], first[name]) for name in first):
            raise KvxferError(
                f"{share} is not the same as {shares[0]}: run all shares again with one version of torch and force=true"
            )
    save_file(first, path)


def _widths(layout: Layout) -> dict[str, int]:
    """Features of each random kind that a layout keeps."""
    return {block.kind: n for block, n in zip(layout.blocks, layout.widths, strict=True) if block.kind in RANDOM}


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise KvxferError(f"{path} is missing, and without it no map can compute its random features: {_AGAIN}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise KvxferError(f"{path} is not readable ({error}): {_AGAIN}") from error
