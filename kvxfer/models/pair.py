"""A pair of models: named by a spec, proved compatible, loaded, and the way in and out of content space for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kvxfer.errors import KvxferError
from kvxfer.models import rope
from kvxfer.models.geometry import Geometry
from kvxfer.models.hf.checks import check_tokenizer
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import check_loadable, load_config, load_model, load_tokenizer
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.hf.published import published_geometry, random_model
from kvxfer.models.hf.tokenizers import compare_tokenizers
from kvxfer.models.kv import KV
from kvxfer.models.remarks import remarks
from kvxfer.models.spec import PairSpec

Side = Literal["source", "target"]

# How far layer 0's content keys of one repeated token may lie from their mean, relative to its norm.
ROTARY_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
LATER_TOLERANCE = 0.1
PROOF_TOKENS = 48


@dataclass(frozen=True)
class Pair:
    """Two loaded models that were proved to share tokens and cache geometry."""

    spec: PairSpec
    source: LoadedModel
    target: LoadedModel
    tokenizer_digest: str

    @property
    def name(self) -> str:
        """The pair's name, with its direction."""
        return self.spec.label

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer (both read the same ids)."""
        return self.target.tokenizer

    @property
    def longest_context(self) -> int:
        """Tokens that both models keep and see in every layer: the shortest sliding window or longest position."""
        return min(_limit(model.geometry)[0] for model in (self.source, self.target))

    @property
    def remarks(self) -> list[str]:
        """What the library warned of while the models were loaded, each once."""
        sides = (("source", self.source), ("target", self.target))
        return [f"{side} {model.name}: {said}" for side, model in sides for said in model.remarks]

    def check_length(self, tokens: int, key: str) -> None:
        """Refuse a sequence longer than either model's window or positions; ``key`` is the setting that asks for it."""
        for model in (self.source, self.target):
            limit, what = _limit(model.geometry)
            if tokens > limit:
                raise KvxferError(
                    f"{key}: {tokens} tokens, but {model.name} has a {what} of {limit}; use {limit} or fewer"
                )

    def reversed(self) -> Pair:
        """The same two models the other way round."""
        return Pair(replace(self.spec, reverse=not self.spec.reverse), self.target, self.source, self.tokenizer_digest)

    def side(self, which: Side) -> LoadedModel:
        return self.source if which == "source" else self.target

    def content(self, which: Side, kv: KV, start: int = 0) -> KV:
        """Content space, in float32, of that model's cache whose first token stands at position ``start``."""
        turn = self._turn(which, kv, start)
        keys = [rope.strip(keys, *turn) for keys in kv.keys]
        hidden = None if kv.hidden is None else kv.hidden.float()
        return KV(keys, [values.float() for values in kv.values], hidden)

    def rotated(self, which: Side, content: KV, start: int = 0) -> KV:
        """The cache, in that model's dtype, of content whose first token stands at position ``start``."""
        dtype, turn = self.side(which).dtype, self._turn(which, content, start)
        keys = [rope.restore(keys, *turn) for keys in content.keys]
        return KV(keys, list(content.values)).apply(lambda x: x.to(dtype))

    def _turn(self, which: Side, kv: KV, start: int) -> tuple[rope.Angles, rope.Angles, float]:
        model = self.side(which)
        cos, sin = (angles.to(kv.keys[0].device) for angles in model.cos_sin(kv.tokens, start))
        return cos, sin, model.geometry.rotary.scaling

    def describe(self) -> dict[str, Any]:
        """All that a map must match to be used with this pair, as plain JSON types."""
        sides = {which: _describe_model(self.side(which)) for which in ("source", "target")}
        return {
            **sides,
            "tokenizer": self.tokenizer_digest,
            "dtype": self.spec.dtype,
            "direction": "reversed" if self.spec.reverse else "forward",
            "longest_context": self.longest_context,
        }


def _describe_model(model: LoadedModel) -> dict[str, Any]:
    local = model.revision.startswith("sha256:")
    digest = {"sha256": model.revision.removeprefix("sha256:")}
    named = {"model": model.name, "revision": model.revision}
    rest = {"drop_layers": list(model.dropped), "geometry": model.geometry.to_dict()}
    return {**(digest if local else named), **rest}


def _limit(geometry: Geometry) -> tuple[int, str]:
    """The longest sequence of a model and what limits it."""
    if geometry.window is not None and geometry.window < geometry.max_positions:
        return geometry.window, "sliding window"
    return geometry.max_positions, "max_position_embeddings"


def load_pair(spec: PairSpec) -> Pair:
    """Both models, ready to run, once everything that can be wrong with the pair has been ruled out.

    Geometries and tokenizers are compared before any weights are read; the rotary proof follows them.
    """
    if spec.random_weights:
        pair = random_pair(spec, spec.device)
        for each in (pair.source, pair.target):
            prove_rotary(each)
        return pair
    models = dict(zip(spec.config_keys, spec.oriented(), strict=True))
    # What is said against them here is said again, and kept, when they are loaded.
    with remarks("transformers"):
        geometries, tokenizers = [], []
        for key, model in models.items():
            config = load_config(model, key)
            geometries.append(read_geometry(config, f"{key} {model.model}"))
            check_loadable(model, config, spec.dtype, spec.device, spec.attention, key)
        check_geometries(*geometries)
        for geometry, (key, model) in zip(geometries, models.items(), strict=True):
            tokenizers.append(load_tokenizer(model, key))
            check_tokenizer(tokenizers[-1], geometry.vocabulary, model, key)
        digest = compare_tokenizers(*tokenizers)
    loaded = [load_model(model, spec.dtype, spec.device, spec.attention, key) for key, model in models.items()]
    for each in loaded:
        prove_rotary(each)
    return Pair(spec, loaded[0], loaded[1], digest)


Load = Callable[[PairSpec], Pair]
"""What loads a pair: ``load_pair``, or something that keeps what it has loaded."""


def random_pair(spec: PairSpec, device: str) -> Pair:
    """A pair of published shapes with random weights; on device "meta" without any, to tell what it would be."""
    sides = list(zip(spec.oriented(), spec.config_keys, spec.slices, strict=True))
    check_geometries(*(published_geometry(model.model, None, key) for model, key, _ in sides))
    source, target = (
        random_model(model.model, layers, spec.dtype, device, spec.attention, key) for model, key, layers in sides
    )
    return Pair(spec, source, target, compare_tokenizers(source.tokenizer, target.tokenizer))


def check_geometries(source: Geometry, target: Geometry) -> None:
    """Refuse two models whose caches have other head counts or sizes."""
    for field, word in (("kv_heads", "KV heads"), ("head_dim", "head size")):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise KvxferError(
                f"pair: {word} ({field}) differ: {ours} in the source, {theirs} in the target; "
                "choose two models of one KV geometry"
            )


def prove_rotary(model: LoadedModel) -> None:
    """Refuse a model whose keys can't be brought to content space with its own cos and sin.

    On a row of one repeated token every layer's input is the same at every position, so what its content keys still
    vary by is a rotation that was not undone: another layout than half-split, or a layer that does not rotate. Only
    layer 0 is free of the rounding of others; a later one is refused where stripping made its keys vary far more.
    """
    ids = torch.full((1, PROOF_TOKENS), len(model.tokenizer) // 2, device=model.device)
    kv = model.prefill(ids)
    _check_cache_shape(model, kv)
    cos, sin = model.cos_sin(PROOF_TOKENS)
    for layer, keys in enumerate(kv.keys):
        left = _spread(rope.strip(keys, cos, sin, model.geometry.rotary.scaling))
        allowed = ROTARY_TOLERANCE[model.dtype] if layer == 0 else LATER_TOLERANCE + 2 * _spread(keys.float())
        if left > allowed:
            raise KvxferError(
                f"{model.name}: layer {layer}'s keys still turn with position once the rotary embedding is taken off "
                f"({left:.2g} of their norm, allowed {allowed:.2g}): interleaved or unknown rotary layout; unsupported"
            )


def _check_cache_shape(model: LoadedModel, kv: KV) -> None:
    geometry = model.geometry
    expected = (1, geometry.kv_heads, PROOF_TOKENS, geometry.head_dim)
    for layer, pair in enumerate(zip(kv.keys, kv.values, strict=True)):
        for tensor in pair:
            if tuple(tensor.shape) != expected:
                raise KvxferError(
                    f"{model.name}: layer {layer} caches {tuple(tensor.shape)}, not {expected}; unsupported"
                )
    if kv.layers != geometry.layers:
        raise KvxferError(
            f"{model.name}: {kv.layers} layers in the cache, {geometry.layers} in the config; unsupported"
        )


def _spread(keys: torch.Tensor) -> float:
    """The largest distance of any position's key from its head's mean key, relative to the head's longest key."""
    mean = keys.mean(dim=2, keepdim=True)
    scale = keys.norm(dim=-1, keepdim=True).amax(dim=2, keepdim=True)
    return float(((keys - mean).norm(dim=-1, keepdim=True) / scale.clamp_min(1e-30)).max())
