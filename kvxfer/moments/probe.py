"""The probe: what a few validation rows hold in content space, for scores that moments cannot give.

It is read without a model or a pair; ``probing`` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import RANDOM, Block
from kvxfer.maps.columns import shifted
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.moments.tensors import read_tensors

PROBE = "probe.safetensors"

SHARED = ("cos", "sin", "scaling", "scale", "exact")
OUTPUT = "target.output."

_EXTRAS = {
    "embedding": "target.embeddings",
    "layer0_keys": "target.keys.0",
    "layer0_values": "target.values.0",
    "source_hidden": "source.hidden",
}


@dataclass(frozen=True)
class Probe:
    """Content of a few rows, and what the target's attention makes of it.

    Attributes:
        tensors: by name. Of each row: ``source.keys.<layer>``, ``source.values.<layer>``, ``target.keys.<layer>``,
            ``target.values.<layer>`` and ``target.queries.<layer>`` (content, float32, ``[rows, heads, tokens, dim]``),
            ``target.embeddings`` and ``source.hidden`` (if a design reads them: ``[rows, tokens, hidden]``),
            ``tokens`` and ``good`` (whether all of the row is finite). Of all rows: ``cos`` and ``sin`` of the target's
            positions, ``scaling`` of its rotary embedding, ``scale`` of each layer's softmax,
            ``target.output.<layer>`` (W_O, ``[hidden, query heads * dim]``), and ``exact``, how many first tokens no
            map is fitted on.
        random: the random features of the calibration, if it kept any.
    """

    tensors: Mapping[str, Tensor]
    random: RandomFeatures | None = None

    @staticmethod
    def load(path: Path, random: RandomFeatures | None = None) -> Probe:
        """The probe of a calibration with these random features; a large pair's is gigabytes, mapped and not read."""
        return Probe(read_tensors(path), random)

    @property
    def exact(self) -> int:
        """First tokens of a row that the target computes itself: no map is fitted on them."""
        return int(self.tensors["exact"])

    def rows(self, name: str) -> Float[Tensor, rows * rest]:
        """One tensor of the rows that are finite, float32."""
        good = self.tensors["good"]
        if not bool(good.any()):
            raise KvxferError("no row of the probe is finite: try pair.dtype=float32")
        return self.tensors[name][good].float()

    def columns(self, block: Block) -> Float[Tensor, "rows tokens width"]:
        """The feature columns of a block; a token without a predecessor at its offset reads zeros."""
        if block.kind in RANDOM:
            return random_columns(self.random, block, self.columns)
        tensor = self.rows(_EXTRAS.get(block.kind, f"source.{block.kind}.{block.layer}"))
        return shifted(tensor if tensor.dim() == 3 else tensor.transpose(1, 2).flatten(2), block.offset)

    def design(self, blocks: tuple[Block, ...]) -> Float[Tensor, "rows tokens features"]:
        return torch.cat([self.columns(block) for block in blocks], dim=-1)


def merge_probes(shares: list[Path], rows: int, path: Path) -> None:
    """The first ``rows`` rows of the whole corpus from the probes of its shares (share i holds rows i, i + n, ...)."""
    parts = [read_tensors(share) for share in shares]
    order = [(row % len(parts), row // len(parts)) for row in range(rows)]
    save_file({name: _merged(name, parts, order) for name in parts[0]}, path)


def _merged(name: str, parts: list[dict[str, Tensor]], order: list[tuple[int, int]]) -> Tensor:
    if name in SHARED or name.startswith(OUTPUT):
        return parts[0][name]
    return torch.stack([parts[share][name][at] for share, at in order])
