"""Making the probe: both models read a few validation rows, and all that attention's output needs is kept."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.maps.columns import read_source
from kvxfer.models import rope
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import finite_rows
from kvxfer.moments.layout import Layout
from kvxfer.moments.probe import OUTPUT


def save_probe(pair: Pair, tokens: Int[Tensor, "rows tokens"], layout: Layout, exact: int, path: Path) -> None:
    """Store the tensors that :class:`kvxfer.moments.probe.Probe` names.

    Args:
        exact: how many first tokens of a row the moments leave out.

    Raises:
        KvxferError: the rows are longer than a sliding window, or the target's attention is more than a softmax.
    """
    # Every token then sees all before it, in sliding layers too.
    pair.check_length(tokens.shape[1], "calibration.probe_tokens")
    projections = pair.target.attention_outputs()
    rows = [_row(pair, ids, layout) for ids in tokens.split(1)]
    tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]}
    cos, sin = pair.target.cos_sin(tokens.shape[1])
    tensors |= {
        "tokens": tokens.contiguous(),
        "cos": cos.cpu().contiguous(),
        "sin": sin.cpu().contiguous(),
        "scaling": torch.tensor(pair.target.geometry.rotary.scaling),
        "scale": torch.tensor([scale for _, scale in projections]),
        "exact": torch.tensor(exact),
    }
    tensors |= {f"{OUTPUT}{layer}": weight.cpu().contiguous() for layer, (weight, _) in enumerate(projections)}
    save_file(tensors, path)


def _row(pair: Pair, ids: Int[Tensor, "1 tokens"], layout: Layout) -> dict[str, Tensor]:
    cached, (kv, queries) = read_source(pair, ids, layout.blocks), pair.target.queries(ids)
    source, target = pair.content("source", cached), pair.content("target", kv)
    cos, sin = pair.target.cos_sin(ids.shape[1])
    scaling = pair.target.geometry.rotary.scaling
    content = [rope.strip(q, cos, sin, scaling) for q in queries]
    named = {"source.keys": source.keys, "source.values": source.values}
    named |= {"target.keys": target.keys, "target.values": target.values, "target.queries": content}
    found = {f"{name}.{layer}": x.cpu() for name, layers in named.items() for layer, x in enumerate(layers)}
    if any(block.kind == "embedding" for block in layout.blocks):
        found["target.embeddings"] = pair.target.embeddings(ids).cpu()
    if source.hidden is not None:
        found["source.hidden"] = source.hidden.cpu()
    return {**found, "good": finite_rows(cached, kv)}


def probe_bytes(pair: Pair, layout: Layout, rows: int, tokens: int) -> int:
    """Bytes of the probe of so many rows, but for a handful of scalars."""
    s, t = pair.source.geometry, pair.target.geometry
    a_token = 2 * s.layers * s.kv_width + t.layers * (2 * t.kv_width + t.heads * t.head_dim)
    extras = {"embedding": t.hidden, "source_hidden": s.hidden}
    a_token += sum(extras.get(kind, 0) for kind in {block.kind for block in layout.blocks})
    outputs = t.layers * t.hidden * t.heads * t.head_dim * pair.target.dtype.itemsize
    return rows * tokens * (4 * a_token + 8) + 4 * 2 * tokens * t.rotary.dim + outputs
