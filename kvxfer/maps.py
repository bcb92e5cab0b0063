"""The artifact: a fitted map as safetensors with a JSON manifest, never pickle.

A map is immutable and belongs to one exact pair. What is learnt about it later lies beside it in ``evidence/``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import KINDS, Block
from kvxfer.moments import Output
from kvxfer.runs import file_sha256, read_json, write_json
from kvxfer.solvers.base import LinearLayer

SCHEMA = 1
MANIFEST, TENSORS, EVIDENCE = "manifest.json", "map.safetensors", "evidence"


@dataclass(frozen=True)
class CacheMap:
    """For every target layer and kind, a linear function of source blocks, and the manifest that names its pair."""

    layers: dict[Output, LinearLayer]
    manifest: dict[str, Any]

    @property
    def parameters(self) -> int:
        """Numbers in the map."""
        return sum(layer.weight.numel() + layer.bias.numel() for layer in self.layers.values())

    @property
    def bytes(self) -> int:
        """Bytes of the tensors as stored (float32)."""
        return 4 * self.parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs to map one token: two per weight, one per bias."""
        return float(sum(2 * layer.weight.numel() + layer.bias.numel() for layer in self.layers.values()))

    @property
    def hash(self) -> str:
        """The map's name: the SHA-256 of its manifest, which holds that of its tensors."""
        return _digest(self.manifest)

    def save(self, directory: Path) -> CacheMap:
        """Write both files and return the map with its manifest completed."""
        tensors = {}
        for (layer, kind), part in self.layers.items():
            tensors[f"{kind}.{layer}.weight"] = part.weight.contiguous()
            tensors[f"{kind}.{layer}.bias"] = part.bias.contiguous()
        blocks = {f"{k}.{layer}": [b.name for b in part.blocks] for (layer, k), part in self.layers.items()}
        manifest = {
            **self.manifest,
            "schema": SCHEMA,
            "form": "linear",
            "dtype": "float32",
            "blocks": blocks,
            "parameters": self.parameters,
        }
        # Each file vouches for the other: the tensors' header holds the manifest's hash, the manifest the tensors'.
        save_file(tensors, directory / TENSORS, metadata={"manifest": _digest(manifest)})
        manifest["sha256"] = file_sha256(directory / TENSORS)
        write_json(directory / MANIFEST, manifest)
        return CacheMap(self.layers, manifest)

    @staticmethod
    def load(directory: Path) -> CacheMap:
        """Read and verify a map.

        Raises:
            KvxferError: a file is missing or altered, or the schema is unknown.
        """
        if not (directory / MANIFEST).is_file() or not (directory / TENSORS).is_file():
            raise KvxferError(f"{directory} holds no map ({MANIFEST} and {TENSORS} are expected)")
        manifest = read_json(directory / MANIFEST)
        if not isinstance(manifest, dict):
            raise KvxferError(f"{directory / MANIFEST} is no manifest of a map: train again with force=true")
        if manifest.get("schema") != SCHEMA:
            raise KvxferError(
                f"{directory}: map schema {manifest.get('schema')} is not {SCHEMA}, the one this version reads"
            )
        digest = file_sha256(directory / TENSORS)
        if digest != manifest.get("sha256"):
            raise KvxferError(
                f"{directory / TENSORS}: SHA-256 {digest[:12]} is not {str(manifest.get('sha256'))[:12]}, which its "
                "manifest gives: the map is damaged or was altered"
            )
        try:
            with safe_open(directory / TENSORS, framework="pt") as file:
                vouched = (file.metadata() or {}).get("manifest")
            if vouched != _digest({key: value for key, value in manifest.items() if key != "sha256"}):
                raise KvxferError("it was altered after the tensors were written")
            layers = _layers(manifest["blocks"], load_file(directory / TENSORS))
        except (KeyError, ValueError, TypeError, AttributeError, KvxferError, SafetensorError) as error:
            raise KvxferError(f"{directory / MANIFEST} does not describe its tensors ({error})") from error
        return CacheMap(layers, manifest)

    def require(self, pair: Mapping[str, Any]) -> None:
        """Refuse a pair that is not the one this map was fitted for, naming the first field that differs."""
        _require_equal(self.manifest.get("pair"), pair, "pair")

    def add_evidence(self, directory: Path, name: str, evidence: dict[str, Any]) -> None:
        """Keep a result about this map beside it."""
        (directory / EVIDENCE).mkdir(exist_ok=True)
        write_json(directory / EVIDENCE / f"{name}.json", {"map": self.hash, **evidence})


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _layers(named: Any, tensors: dict[str, Tensor]) -> dict[Output, LinearLayer]:
    """The layers that a manifest's blocks and the tensors make up: all of them, each of its blocks' width."""
    layers = {}
    for name, blocks in named.items():
        kind, _, layer = name.partition(".")
        parts = tuple(Block.parse(str(block)) for block in blocks)
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        if weight.shape != (len(parts) * len(bias), len(bias)):
            raise ValueError(f"{name}: {len(parts)} blocks do not fit a weight of {tuple(weight.shape)}")
        layers[int(layer), kind] = LinearLayer(parts, weight, bias)
    complete = {(layer, kind) for layer in range(len(tensors) // (2 * len(KINDS))) for kind in KINDS}
    if not layers or set(layers) != complete:
        raise ValueError(f"{len(layers)} layers and kinds of {len(tensors)} tensors")
    return layers


def _require_equal(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted(set(ours) | set(theirs)):
            _require_equal(ours.get(key), theirs.get(key), f"{where}.{key}")
    elif ours != theirs:
        raise KvxferError(
            f"the map was fitted with {where} = {_short(ours)} but this pair has {_short(theirs)}: "
            "use the same checkpoints (pair.source.revision, pair.target.revision) or calibrate and train again"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
