"""What is trained for outputs that read the same columns, and its export into a map.

Inside, input columns are standardised and outputs are in units of their deviation, so that one learning rate means the
same for every layer; export folds both into the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.scales import Scales
from kvxfer.fitting.trained.specs import MLP, Layered
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import ACTIVATIONS, Trunk

Read = Callable[[Block], Float[Tensor, "batch tokens width"]]
Exported = tuple[dict[Output, LinearLayer], list[Trunk]]


class Part(nn.Module, ABC):
    """What is trained for the outputs that read the same blocks."""

    mean: Tensor
    deviation: Tensor
    unit: Tensor

    def __init__(self, blocks: tuple[Block, ...], outputs: list[Output], scales: Scales) -> None:
        super().__init__()
        self.blocks, self.outputs = blocks, outputs
        inputs = [scales.of(block) for block in blocks]
        # Buffers, so that a checkpoint holds what its weights are relative to. Double: export folds them in.
        self.register_buffer("mean", torch.cat([scale.mean for scale in inputs]))
        self.register_buffer("deviation", torch.cat([scale.deviation for scale in inputs]))
        self.register_buffer("unit", torch.stack([scales.of(output).deviation for output in outputs]))

    @property
    def inputs(self) -> int:
        return len(self.mean)

    def forward(self, read: Read) -> Float[Tensor, "outputs tokens width"]:
        """What the part adds to each output; ``read`` gives a block's columns."""
        with torch.no_grad(), torch.autocast(self.mean.device.type, enabled=False):
            x = torch.cat([read(block) for block in self.blocks], dim=-1).flatten(0, 1)
            x = (x - self.mean.float()) * self.deviation.reciprocal().float()
        return self.standard(x) * self.unit[:, None].float()

    @abstractmethod
    def standard(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "outputs tokens width"]:
        """The same of standardised columns, in units of the outputs' deviations."""

    @abstractmethod
    def export(self, base: dict[Output, LinearLayer]) -> Exported:
        """The part's outputs as parts of a map, where these are the base's layers."""

    def _unstandardised(
        self, weight: Float[Tensor, "inputs columns"]
    ) -> tuple[Float[Tensor, "inputs columns"], Float[Tensor, " columns"]]:
        """A weight over standardised columns as one over the columns themselves, and what that adds to the bias."""
        folded = weight.double() / self.deviation[:, None]
        return folded, -(self.mean @ folded)


class Hidden(Part):
    """Hidden layers and a readout for every output: one stack of layers for each output, or one that all read.

    Those of an MLP are the outputs, with a bias; others are added to the base's content, and are zero at first.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        outputs: list[Output],
        scales: Scales,
        spec: Layered,
        generator: torch.Generator,
    ) -> None:
        super().__init__(blocks, outputs, scales)
        self.activation, self.replaces = spec.activation, isinstance(spec, MLP)
        shared, depth = (spec.share, spec.depth) if isinstance(spec, MLP) else (False, 1)
        self.stacks = 1 if shared else len(outputs)
        count, width = self.unit.shape
        hidden = spec.hidden
        drawn = lambda *shape, fan: nn.Parameter(_uniform(shape, fan, generator))  # noqa: E731
        # The first layers of all stacks are one matrix, stack after stack.
        self.first = drawn(self.inputs, self.stacks * hidden, fan=self.inputs)
        self.later = nn.ParameterList(drawn(self.stacks, hidden, hidden, fan=hidden) for _ in range(depth - 1))
        self.biases = nn.ParameterList(
            drawn(self.stacks, hidden, fan=self.inputs if not layer else hidden) for layer in range(depth)
        )
        if not self.replaces:
            self.readout = nn.Parameter(torch.zeros(count, hidden, width))
            return
        self.readout = drawn(count, hidden, width, fan=hidden)
        self.bias = drawn(count, width, fan=hidden)
        self.centre: Tensor
        self.register_buffer("centre", torch.stack([scales.of(output).mean for output in outputs]))

    def forward(self, read: Read) -> Float[Tensor, "outputs tokens width"]:
        y = super().forward(read)
        return y + self.centre[:, None].float() if self.replaces else y

    def standard(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "outputs tokens width"]:
        act = ACTIVATIONS[self.activation]
        h = (x @ self.first).unflatten(-1, (self.stacks, -1)).transpose(0, 1)
        h = act(h + self.biases[0][:, None])
        for weight, bias in zip(self.later, self.biases[1:], strict=True):
            h = act(h @ weight + bias[:, None])
        y = h @ self.readout
        return y + self.bias[:, None] if self.replaces else y

    @torch.no_grad()
    def export(self, base: dict[Output, LinearLayer]) -> Exported:
        """One trunk for each stack; an output that is replaced keeps its bias alone as linear part."""
        folded, shift = self._unstandardised(self.first)
        weights = [folded.unflatten(-1, (self.stacks, -1)).transpose(0, 1), *self.later]
        biases = [shift.unflatten(-1, (self.stacks, -1)) + self.biases[0].double(), *self.biases[1:]]
        readouts = _plain(self.readout.double() * self.unit[:, None])
        layers = {output: base[output] for output in self.outputs}
        if self.replaces:
            for output, bias in zip(self.outputs, _plain(self.centre + self.unit * self.bias.double()), strict=True):
                layers[output] = constant(bias)
        trunks = []
        for stack in range(self.stacks):
            read = self.outputs if self.stacks == 1 else [self.outputs[stack]]
            trunks.append(
                Trunk(
                    self.blocks,
                    tuple(_plain(weight[stack]) for weight in weights),
                    tuple(_plain(bias[stack]) for bias in biases),
                    self.activation,
                    {output: readouts[self.outputs.index(output)].clone() for output in read},
                )
            )
        return layers, trunks


class Delta(Part):
    """A change of each output's weight and bias: any, or of a rank; zero at first."""

    def __init__(
        self,
        blocks: tuple[Block, ...],
        outputs: list[Output],
        scales: Scales,
        rank: int | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__(blocks, outputs, scales)
        count, width = self.unit.shape
        self.rank = rank
        self.step = self.inputs**-0.5
        """What a full change is a multiple of. All its weights move at once, and columns go together: at the learning
        rate that suits hidden layers, a step would otherwise be the longer the more columns there are."""
        self.bias = nn.Parameter(torch.zeros(count, width))
        if rank is None:
            self.weight = nn.Parameter(torch.zeros(count, self.inputs, width))
            return
        if rank > min(self.inputs, width):
            raise KvxferError(
                f"solver.delta_rank={rank} is more than a weight of {self.inputs} × {width} has: "
                "lower it, or set null for a full change"
            )
        self.weight = nn.Parameter(_uniform((count, self.inputs, rank), self.inputs, generator))
        self.right = nn.Parameter(torch.zeros(count, rank, width))

    def standard(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "outputs tokens width"]:
        y = x @ self.weight
        return (y * self.step if self.rank is None else y @ self.right) + self.bias[:, None]

    @torch.no_grad()
    def export(self, base: dict[Output, LinearLayer]) -> Exported:
        """The base's layers with the changes folded in: in two factors where base and change both are, else whole."""
        layers = {}
        last = self.weight if self.rank is None else self.right
        for n, output in enumerate(self.outputs):
            old, unit = base[output], self.unit[n]
            if not last[n].any() and not self.bias[n].any():
                # No change: in another form it would be the same function, but not the same bits.
                layers[output] = old
                continue
            weight, shift = self._unstandardised(self.weight[n] * (self.step if self.rank is None else 1))
            right = None if self.rank is None else self.right[n].double() * unit
            bias = old.bias.to(unit) + unit * self.bias[n].double() + (shift * unit if right is None else shift @ right)
            if right is not None and old.right is not None and old.groups == 1:
                factors = [torch.cat([old.weight[0].to(unit), weight], 1), torch.cat([old.right[0].to(unit), right], 0)]
                layers[output] = LinearLayer(
                    old.blocks, *(_plain(x) for x in (factors[0][None], bias, factors[1][None]))
                )
                continue
            change = weight * unit if right is None else weight @ right
            layers[output] = LinearLayer(old.blocks, _plain(old.dense().to(unit) + change)[None], _plain(bias))
        return layers, []


def constant(bias: Float[Tensor, " width"]) -> LinearLayer:
    """An output without a linear part."""
    return LinearLayer((), bias.new_zeros(1, 0, len(bias)), bias)


def _uniform(shape: tuple[int, ...], fan: int, generator: torch.Generator) -> Tensor:
    """As ``torch.nn.Linear`` draws weights and biases of so many inputs."""
    bound = fan**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().cpu().contiguous()
