"""Attention-output error: what mapped content does to what the target's attention gives, from the probe alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvxfer.maps.blocks import Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models import rope
from kvxfer.moments.probe import OUTPUT, Probe

Content = Float[Tensor, "rows heads tokens dim"]


class LayerAttention:
    """One target layer's attention over the probe's rows: the true content, and what it gives."""

    def __init__(self, probe: Probe, layer: int) -> None:
        self.exact = probe.exact
        self.angles = probe.tensors["cos"], probe.tensors["sin"], float(probe.tensors["scaling"])
        self.scale = float(probe.tensors["scale"][layer])
        self.projection = probe.tensors[f"{OUTPUT}{layer}"].float()
        self.queries = rope.restore(probe.rows(f"target.queries.{layer}"), *self.angles)
        self.keys, self.values = probe.rows(f"target.keys.{layer}"), probe.rows(f"target.values.{layer}")
        self.true = self.output(self.keys, self.values)[:, self.exact :]
        self.total = float((self.true - self.true.mean((0, 1))).double().square().sum())

    def output(self, keys: Content, values: Content) -> Float[Tensor, "rows tokens hidden"]:
        """The attention's output, after W_O (without its bias), of the true queries over some content."""
        heads = scaled_dot_product_attention(
            self.queries,
            rope.restore(keys, *self.angles),
            values,
            is_causal=True,
            scale=self.scale,
            enable_gqa=True,
        )
        return heads.transpose(1, 2).flatten(2) @ self.projection.T

    def score(self, keys: Content | None = None, values: Content | None = None) -> float:
        """1 - (squared error of the output) / (its squared deviation from its mean over tokens), like R².

        What is not given is the true content. First tokens that no map is fitted on are the true ones too, and their
        own outputs are not counted. An output that does not vary scores 0.
        """
        mapped = (
            self.keys if keys is None else self._with_exact(keys, self.keys),
            self.values if values is None else self._with_exact(values, self.values),
        )
        error = float((self.output(*mapped)[:, self.exact :] - self.true).double().square().sum())
        return 1 - error / self.total if self.total > 0 else 0.0

    def _with_exact(self, mapped: Content, true: Content) -> Content:
        return torch.cat([true[:, :, : self.exact], mapped[:, :, self.exact :]], dim=2)


def by_head(columns: Float[Tensor, "rows tokens width"], heads: int) -> Content:
    """The columns of one output as content."""
    return columns.unflatten(-1, (heads, -1)).transpose(1, 2)


def map_scores(
    layers: Mapping[Output, LinearLayer], probe: Probe, trunks: Sequence[Trunk] = ()
) -> dict[Output, dict[str, Any]]:
    """The attention-output scores of a map, once for every target layer.

    Args:
        trunks: what its outputs read beside their linear parts.

    Returns:
        For every output ``attention_score`` (the other kind true) and ``attention_score_joint`` (both kinds mapped).
    """
    found: dict[Output, dict[str, Any]] = {}
    for layer in sorted({layer for layer, _ in layers}):
        attention = LayerAttention(probe, layer)
        heads = attention.keys.shape[1]
        mapped = {}
        for kind in ("keys", "values"):
            part = layers[layer, kind]
            columns = part.bias.expand(*attention.keys.shape[::2], -1)
            if part.blocks:
                columns = probe.design(part.blocks) @ part.dense() + part.bias
            for trunk in trunks:
                if (layer, kind) in trunk.readouts:
                    columns = columns + trunk.hidden(probe.design(trunk.blocks)) @ trunk.readouts[layer, kind]
            mapped[kind] = by_head(columns, heads)
        joint = attention.score(**mapped)
        for kind, content in mapped.items():
            own = attention.score(**{kind: content})
            found[layer, kind] = {"attention_score": own, "attention_score_joint": joint}
    return found
