"""The nonlinear part of a map: hidden layers over some blocks' columns, and what reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block, Output

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}
"""What hidden layers may be followed by; ``gelu`` is the exact one, with erf."""

_TENSORS = "trunk."


@dataclass(frozen=True)
class Trunk:
    """Hidden layers over some blocks' columns, of which outputs add a linear readout to their linear part.

    ``h = act(x W_0 + b_0)``, ``h = act(h W_1 + b_1)``, ...; an output adds ``h @ readouts[output]``. Everything is
    float32 once it is trained.

    Attributes:
        blocks: whose columns, side by side, are x.
        activation: a key of ``ACTIVATIONS``.
        readouts: of every output that reads the trunk, one or more.

    Raises:
        KvxferError: an unknown activation, no hidden layer or no readout, or shapes that do not fit each other.
    """

    blocks: tuple[Block, ...]
    weights: tuple[Float[Tensor, "_ _"], ...]
    biases: tuple[Float[Tensor, " _"], ...]
    activation: str
    readouts: dict[Output, Float[Tensor, "hidden width"]]

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise KvxferError(
                f"a trunk's activation is {self.activation!r} and this version knows {', '.join(ACTIVATIONS)}"
            )
        if not self.blocks or not self.weights or not self.readouts:
            raise KvxferError("a trunk has no blocks, no hidden layers or no readouts")
        shapes = [tuple(weight.shape) for weight in self.weights]
        chained = all(a[1] == b[0] for a, b in itertools.pairwise(shapes))
        if not chained or [shape[1:] for shape in shapes] != [tuple(bias.shape) for bias in self.biases]:
            raise KvxferError(f"a trunk's hidden layers of {shapes} do not fit each other or their biases")
        for output, readout in self.readouts.items():
            if len(readout) != self.hidden_width:
                raise KvxferError(
                    f"the readout of {_name(output)}, {tuple(readout.shape)}, does not fit a trunk of "
                    f"{self.hidden_width} hidden columns"
                )

    @property
    def inputs(self) -> int:
        """Columns that it reads."""
        return self.weights[0].shape[0]

    @property
    def hidden_width(self) -> int:
        """Columns of the last hidden layer, which the readouts read."""
        return self.weights[-1].shape[1]

    @property
    def parameters(self) -> int:
        """Numbers in it, readouts included."""
        return sum(t.numel() for t in (*self.weights, *self.biases, *self.readouts.values()))

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight, one per bias; hidden layers once, however many readouts there are."""
        return 2 * self.parameters - sum(bias.numel() for bias in self.biases)

    def hidden(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch hidden"]:
        """The last hidden layer over the columns of ``blocks`` side by side."""
        act = ACTIVATIONS[self.activation]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = act(x @ weight.to(x) + bias.to(x))
        return x

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The tensors by their names in a map's file, where it is the map's trunk of this number."""
        found = {}
        for depth, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            found[f"{_TENSORS}{number}.{depth}.weight"] = weight.contiguous()
            found[f"{_TENSORS}{number}.{depth}.bias"] = bias.contiguous()
        for output, readout in self.readouts.items():
            found[f"{_TENSORS}{number}.readout.{_name(output)}"] = readout.contiguous()
        return found

    def describe(self) -> dict[str, Any]:
        """What a map's manifest says of it."""
        return {
            "blocks": [block.name for block in self.blocks],
            "hidden": [weight.shape[1] for weight in self.weights],
            "activation": self.activation,
            "readouts": [_name(output) for output in self.readouts],
        }


def read_trunks(described: Any, tensors: dict[str, Tensor], width_of: Callable[[Block], int]) -> tuple[Trunk, ...]:
    """The trunks that a manifest describes; their tensors are taken out of the dictionary.

    Args:
        described: ``trunks`` of the manifest; empty where the map has none.
        width_of: columns of a block.

    Raises:
        KvxferError, KeyError, TypeError, ValueError, AttributeError: the description is none, or its tensors are
            missing, of other shapes, or not all of those that are there.
    """
    if not isinstance(described, Sequence) or isinstance(described, str):
        raise KvxferError("trunks is no list")
    found = tuple(_trunk(number, entry, tensors, width_of) for number, entry in enumerate(described))
    if left := sorted(name for name in tensors if name.startswith(_TENSORS)):
        raise KvxferError(f"{left[0]} belongs to no trunk")
    return found


def _trunk(number: int, entry: Any, tensors: dict[str, Tensor], width_of: Callable[[Block], int]) -> Trunk:
    start = f"{_TENSORS}{number}"
    if not isinstance(entry, Mapping) or not isinstance(entry["activation"], str):
        raise KvxferError(f"{start} is not described")
    blocks = tuple(Block.parse(str(name)) for name in entry["blocks"])
    depths = range(len(entry["hidden"]))
    weights, biases = (tuple(tensors.pop(f"{start}.{depth}.{part}") for depth in depths) for part in ("weight", "bias"))
    readouts = {_output(name): tensors.pop(f"{start}.readout.{name}") for name in entry["readouts"]}
    shaped = [(tensor, 2) for tensor in (*weights, *readouts.values())] + [(bias, 1) for bias in biases]
    if any(tensor.ndim != axes or tensor.dtype != torch.float32 for tensor, axes in shaped):
        raise KvxferError(f"{start} has tensors that are not float32, or no matrices and vectors")
    trunk = Trunk(blocks, weights, biases, entry["activation"], readouts)
    if [weight.shape[1] for weight in weights] != list(entry["hidden"]):
        raise KvxferError(f"{start}: hidden layers of {[w.shape[1] for w in weights]} are not {entry['hidden']}")
    if trunk.inputs != sum(width_of(block) for block in blocks):
        raise KvxferError(f"{start}: {len(blocks)} blocks do not fit a weight of {tuple(weights[0].shape)}")
    return trunk


def require_readable(trunks: Iterable[Trunk], widths: Mapping[Output, int]) -> None:
    """Refuse trunks that are read by an output that is not among those of these widths, or has another width."""
    for trunk in trunks:
        for output, readout in trunk.readouts.items():
            if output not in widths:
                raise KvxferError(f"a trunk has a readout of {_name(output)}, which the map has no layer for")
            if readout.shape[1] != widths[output]:
                raise KvxferError(
                    f"a trunk's readout of {_name(output)} gives {readout.shape[1]} columns, its layer {widths[output]}"
                )


def _name(output: Output) -> str:
    """An output's name in files, as its linear part has."""
    layer, kind = output
    return f"{kind}.{layer}"


def _output(name: str) -> Output:
    kind, _, layer = name.partition(".")
    return int(layer), kind
