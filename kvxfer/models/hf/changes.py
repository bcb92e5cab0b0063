"""What healing changed of a pruned model: low-rank changes of its linear layers, and the scales of its norms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.hf.pruning import prune_model
from kvxfer.models.hub import first_line

DOWN, UP, SCALE = "down", "up", "scale"
"""A linear layer's weight becomes ``weight + up @ down``, a norm's ``weight * (1 + scale)``."""


@dataclass(frozen=True)
class Changes:
    """Of the model without ``dropped`` layers: changes by module name and one of ``down``, ``up`` and ``scale``.

    ``down`` is ``[rank, in]``, ``up`` ``[out, rank]``, ``scale`` ``[dim]``; names are those after the layers are gone.
    """

    dropped: tuple[int, ...]
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def apply(self, lm: Any, key: str) -> None:
        """Take the dropped layers out of a model in float32 and change the others, in place."""
        prune_model(lm, self.dropped, key)
        for name in sorted({name.rpartition(".")[0] for name in self.tensors}):
            weight = lm.base_model.get_submodule(name).weight
            if (scale := self.tensors.get(f"{name}.{SCALE}")) is not None:
                weight.mul_(1 + scale.to(weight.dtype))
            else:
                up, down = (self.tensors[f"{name}.{part}"].to(weight.dtype) for part in (UP, DOWN))
                weight.add_(up @ down)


def read_changes(file: Path, key: str) -> Changes:
    """The changes of a file that ``tools.healing`` wrote; ``key`` names the setting in errors."""
    try:
        with safe_open(file, "pt") as opened:
            about = json.loads(opened.metadata()["healing"])
            return Changes(tuple(about["dropped"]), {name: opened.get_tensor(name) for name in sorted(opened.keys())})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise KvxferError(f"{key}.model: {file} can't be read ({first_line(error)}); install kvxfer again") from error
