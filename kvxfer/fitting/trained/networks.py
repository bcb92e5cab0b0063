"""What is trained: the networks of the trained solvers, from source content to the target's, and their export."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.parts import Delta, Hidden, Part, constant
from kvxfer.fitting.trained.scales import Scales
from kvxfer.fitting.trained.specs import Corrected, Layered, Trained
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import KINDS, Block, Output
from kvxfer.maps.columns import TargetTokens, block_columns
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models.kv import KV


class Network(nn.Module):
    """The base's content with what is trained added, or put in its place for the outputs of an MLP.

    The base, a map of linear layers, is no part of the module: its weights are on the device once, are not trained, and
    stand in no checkpoint.
    """

    def __init__(self, base: CacheMap, parts: Iterable[Part], device: torch.device) -> None:
        super().__init__()
        self.base = base
        self.parts = nn.ModuleList(parts).to(device)
        kept = dict(base.layers)
        for part in self._parts():
            if isinstance(part, Hidden) and part.replaces:
                kept |= {output: constant(torch.zeros_like(base.layers[output].bias)) for output in part.outputs}
        self.mapper = Mapper(replace(base, layers=kept), device)

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, source: KV, known: TargetTokens) -> KV:
        """The target's content (float32) of every token of the source's content."""
        found: dict[Block, Tensor] = {}

        def read(block: Block) -> Tensor:
            if block not in found:
                found[block] = block_columns(source, known, self.mapper.random, block)
            return found[block]

        with torch.no_grad(), torch.autocast(source.keys[0].device.type, enabled=False):
            mapped = self.mapper.content(source, known)
        content = {"keys": list(mapped.keys), "values": list(mapped.values)}
        for part in self._parts():
            for (layer, kind), added in zip(part.outputs, part(read).float(), strict=True):
                old = content[kind][layer]
                heads = added.view(source.batch, source.tokens, old.shape[1], -1).transpose(1, 2)
                content[kind][layer] = old + heads
        return KV(content["keys"], content["values"])

    def export(self) -> tuple[dict[Output, LinearLayer], tuple[Trunk, ...]]:
        """The layers and trunks of a map that gives the same; float32, on the CPU."""
        layers, trunks = dict(self.base.layers), []
        for part in self._parts():
            own, added = part.export(self.base.layers)
            layers |= own
            trunks += added
        return layers, tuple(trunks)

    def _parts(self) -> list[Part]:
        return list(self.parts)  # type: ignore[arg-type]


def trained_outputs(base: CacheMap, spec: Trained) -> list[Output]:
    """The target layers and kinds that a solver trains.

    Raises:
        KvxferError: the target has no such layer, or the base is no map of linear layers.
    """
    if base.trunks:
        raise KvxferError(
            f"it is a {base.manifest['solver']['name']} map and the base must be linear: name the map of a closed form "
            "(solver.base_map)"
        )
    layers = range(len(base.layers) // len(KINDS))
    chosen = layers if spec.layers is None else spec.layers
    if any(layer not in layers for layer in chosen):
        raise KvxferError(f"solver.layers={list(chosen)}: the target has layers 0 to {layers[-1]}")
    return [(layer, kind) for layer in chosen for kind in KINDS]


def make_network(base: CacheMap, spec: Trained, scales: Scales, seed: int, device: torch.device) -> Network:
    """The network of a trained solver before its first step; the seed alone decides its weights."""
    groups: dict[tuple[Block, ...], list[Output]] = {}
    for output in trained_outputs(base, spec):
        groups.setdefault(base.layers[output].blocks, []).append(output)
    generator = torch.Generator().manual_seed(seed)
    return Network(base, [_part(spec, *group, scales, generator) for group in groups.items()], device)


def _part(
    spec: Trained, blocks: tuple[Block, ...], outputs: list[Output], scales: Scales, generator: torch.Generator
) -> Part:
    if isinstance(spec, Corrected):
        return Delta(blocks, outputs, scales, spec.delta_rank, generator)
    assert isinstance(spec, Layered)
    return Hidden(blocks, outputs, scales, spec, generator)
