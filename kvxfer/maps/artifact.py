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
from kvxfer.files import file_sha256, read_json, write_json
from kvxfer.maps.blocks import KINDS, RANDOM, Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.maps.trunks import Trunk, read_trunks, require_readable

SCHEMA = 3
MANIFEST, TENSORS, EVIDENCE = "manifest.json", "map.safetensors", "evidence"
DIAGNOSTICS, SELECTION = "diagnostics.json", "selection.json"
"""What a fit recorded of its own quality, beside the map; it is not part of the artifact."""
TRAINING_RECORD = "training.json"
"""How a map was trained, if it was, also beside it."""
_CACHED_BYTES = 2


@dataclass(frozen=True)
class CacheMap:
    """For every target layer and kind, a function of blocks, and the manifest that names its pair.

    The function is linear, plus what is read out of the trunks where a map was trained. Each output has its linear
    part; where that is its bias alone it has no blocks, and a weight of no rows.

    Attributes:
        random: the random features that some layers or trunks read, or None.
        trunks: hidden layers that outputs read beside their linear parts.

    Raises:
        KvxferError: a trunk is read by an output that has no layer here, or one of another width.
    """

    layers: dict[Output, LinearLayer]
    manifest: dict[str, Any]
    random: RandomFeatures | None = None
    trunks: tuple[Trunk, ...] = ()

    def __post_init__(self) -> None:
        require_readable(self.trunks, {output: layer.bias.numel() for output, layer in self.layers.items()})

    @property
    def _parts(self) -> list[LinearLayer | Trunk]:
        return [*self.layers.values(), *self.trunks]

    @property
    def blocks(self) -> set[Block]:
        """All blocks that some layer or trunk reads."""
        return {block for part in self._parts for block in part.blocks}

    @property
    def extras(self) -> tuple[Block, ...]:
        """Those of them that are no source layer's keys or values."""
        return tuple(sorted(block for block in self.blocks if not block.is_source))

    @property
    def parameters(self) -> int:
        """Numbers in the map, the random features' own included."""
        random = 0 if self.random is None else self.random.parameters
        return random + sum(part.parameters for part in self._parts)

    @property
    def form(self) -> str:
        """What the tensors are: full-head or head-local weights (or mixed), whole or (some of them) in two factors, and
        whether there are trunks."""
        forms = {"full_head" if layer.groups == 1 else "head_local" for layer in self.layers.values()}
        heads = forms.pop() if len(forms) == 1 else "mixed"
        factors = "_low_rank" if any(layer.right is not None for layer in self.layers.values()) else ""
        return heads + factors + ("_trunks" if self.trunks else "")

    @property
    def bytes(self) -> int:
        """Bytes of the tensors as stored (float32)."""
        return 4 * self.parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs to map one token: two per weight, one per bias, and what the blocks cost that are not look-ups.

        The random features are computed once for all layers. The target's first layer costs its two projections of the
        embedding. An embedding and the source's hidden state are read and cost nothing.
        """
        flops = sum(part.flops for part in self._parts)
        if self.random is not None:
            flops += self.random.flops
        if any(block.kind.startswith("layer0") for block in self.extras):
            flops += 2 * 2 * hidden_columns(self.manifest, "target") * self.width
        return float(flops)

    @property
    def bytes_read_per_token(self) -> int:
        """Bytes read to map one token, at two bytes a number (bfloat16) and without the weights, which a batch shares.

        ``2 (n w + e + h)``: n source layers' keys or values of w columns, each once (neighbouring tokens share what is
        read at earlier offsets; random features read all of their layers), e the target's hidden size if its embedding
        or first layer is read, h the source's if its final hidden state is.
        """
        known = {"embedding", "layer0_keys", "layer0_values"} & {block.kind for block in self.extras}
        target = hidden_columns(self.manifest, "target") if known else 0
        return self.bytes_from_source_per_token + _CACHED_BYTES * target

    @property
    def bytes_from_source_per_token(self) -> int:
        """Those of ``bytes_read_per_token`` that the source has (its cache and final hidden state) and must send."""
        cached = {(block.layer, block.kind) for block in self.blocks if block.is_source}
        if self.random is not None:
            cached |= {(block.layer, block.kind) for block in self.random.inputs}
        hidden = any(block.kind == "source_hidden" for block in self.extras)
        return _CACHED_BYTES * (len(cached) * self.width + (hidden_columns(self.manifest, "source") if hidden else 0))

    @property
    def bytes_written_per_token(self) -> int:
        """Bytes of the target's cache of one token at two bytes a number: keys and values of all its layers."""
        return _CACHED_BYTES * len(self.layers) * self.width

    @property
    def width(self) -> int:
        """Columns of one layer's keys."""
        return next(iter(self.layers.values())).bias.numel()

    @property
    def skip_first(self) -> int:
        """First tokens of a row that the map was not fitted on; 0 where its manifest does not say."""
        return int(self.manifest.get("calibrated_on", {}).get("skip_first", 0))

    @property
    def hash(self) -> str:
        """The map's name: the SHA-256 of its manifest, which holds that of its tensors."""
        return _digest(self.manifest)

    def save(self, directory: Path) -> CacheMap:
        """Write both files and return the map with its manifest completed."""
        tensors: dict[str, Tensor] = {}
        for (layer, kind), part in self.layers.items():
            tensors[f"{kind}.{layer}.weight"] = part.weight.contiguous()
            tensors[f"{kind}.{layer}.bias"] = part.bias.contiguous()
            if part.right is not None:
                tensors[f"{kind}.{layer}.right"] = part.right.contiguous()
        if self.random is not None:
            tensors |= self.random.tensors()
        for number, trunk in enumerate(self.trunks):
            tensors |= trunk.tensors(number)
        blocks = {f"{k}.{layer}": [b.name for b in part.blocks] for (layer, k), part in self.layers.items()}
        manifest = {
            **{key: value for key, value in self.manifest.items() if key != "sha256"},
            "schema": SCHEMA,
            "form": self.form,
            "dtype": "float32",
            "blocks": blocks,
            "random_layers": [] if self.random is None else list(self.random.layers),
            "trunks": [trunk.describe() for trunk in self.trunks],
            "parameters": self.parameters,
        }
        # Each file vouches for the other: the tensors' header holds the manifest's hash, the manifest the tensors'.
        save_file(tensors, directory / TENSORS, metadata={"manifest": _digest(manifest)})
        manifest["sha256"] = file_sha256(directory / TENSORS)
        write_json(directory / MANIFEST, manifest)
        return CacheMap(self.layers, manifest, self.random, self.trunks)

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
                f"{directory}: map schema {manifest.get('schema')} is not {SCHEMA}, which this version reads"
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
            layers, random, trunks = _read_parts(manifest, load_file(directory / TENSORS))
            return CacheMap(layers, manifest, random, trunks)
        except (KeyError, ValueError, TypeError, AttributeError, KvxferError, SafetensorError) as error:
            raise KvxferError(f"{directory / MANIFEST} does not describe its tensors ({error})") from error

    def require(self, pair: Mapping[str, Any]) -> None:
        """Refuse a pair that is not the one this map was fitted for, naming the first field that differs."""
        _require_equal(self.manifest.get("pair"), pair, "pair")

    def add_evidence(self, directory: Path, name: str, evidence: dict[str, Any]) -> None:
        """Keep a result about this map beside it."""
        (directory / EVIDENCE).mkdir(exist_ok=True)
        write_json(directory / EVIDENCE / f"{name}.json", {"map": self.hash, **evidence})


def hidden_columns(manifest: Mapping[str, Any], side: str) -> int:
    """Columns of a model's embedding and hidden states."""
    return manifest["pair"][side]["geometry"]["hidden"]


def _read_parts(
    manifest: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[Output, LinearLayer], RandomFeatures | None, tuple[Trunk, ...]]:
    """What a map's tensors make up: its linear layers, random features and trunks.

    Raises:
        KvxferError, KeyError, TypeError, ValueError, AttributeError: the tensors are not those that it describes.
    """
    biases = [len(tensor) for name, tensor in tensors.items() if name.startswith(KINDS) and name.endswith(".bias")]
    width = max(biases, default=0)
    random = RandomFeatures.of(tensors, [int(layer) for layer in manifest["random_layers"]], width)
    trunks = read_trunks(manifest["trunks"], tensors, lambda block: _width(block, width, manifest, random))
    return _layers(manifest, tensors, random), random, trunks


def _layers(
    manifest: Mapping[str, Any], tensors: dict[str, Tensor], random: RandomFeatures | None
) -> dict[Output, LinearLayer]:
    """The layers that a manifest's blocks and the tensors make up: all of them, each of its blocks' width."""
    layers = {}
    for name, blocks in manifest["blocks"].items():
        kind, _, layer = name.partition(".")
        parts = tuple(Block.parse(str(block)) for block in blocks)
        weight, bias, right = tensors[f"{name}.weight"], tensors[f"{name}.bias"], tensors.get(f"{name}.right")
        groups, features, inner = weight.shape
        last = inner if right is None else right.shape[-1]
        widths = [_width(part, len(bias), manifest, random) for part in parts]
        if (groups * features, groups * last) != (sum(widths), len(bias)) or any(width % groups for width in widths):
            raise ValueError(f"{name}: {len(parts)} blocks do not fit a weight of {tuple(weight.shape)}")
        if groups > 1 and not (parts and all(part.is_source for part in parts)):
            raise ValueError(f"{name}: a head-local weight reads source blocks only")
        if right is not None and right.shape[:2] != (groups, inner):
            raise ValueError(f"{name}: factors of {tuple(weight.shape)} and {tuple(right.shape)} do not fit")
        layers[int(layer), kind] = LinearLayer(parts, weight, bias, right)
    biases = sum(name.endswith(".bias") for name in tensors)
    if not layers or set(layers) != {(layer, kind) for layer in range(biases // len(KINDS)) for kind in KINDS}:
        raise ValueError(f"{len(layers)} layers and kinds of {biases}")
    return layers


def _width(block: Block, kv_width: int, manifest: Mapping[str, Any], random: RandomFeatures | None) -> int:
    """Columns of a block where one layer's keys have ``kv_width``."""
    if block.kind == "embedding":
        return hidden_columns(manifest, "target")
    if block.kind == "source_hidden":
        return hidden_columns(manifest, "source")
    if block.kind not in RANDOM:
        return kv_width
    return (random.widths if random is not None else {})[block.kind]


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
