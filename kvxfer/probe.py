"""The probe: content and target queries of a few validation rows, for scores that moments cannot give."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer import rope
from kvxfer.pairs import Pair

PROBE = "probe.safetensors"


def save_probe(pair: Pair, tokens: Tensor, path: Path) -> None:
    """Store, for each row, float32 content keys and values of both models and the target's content queries.

    Names are ``source.keys.<layer>``, ``target.values.<layer>``, ``target.queries.<layer>`` and ``tokens``; tensors are
    ``[rows, heads, tokens, dim]``.
    """
    parts: dict[str, list[Tensor]] = {}
    for ids in tokens.split(1):
        source = pair.content("source", pair.source.prefill(ids))
        kv, queries = pair.target.queries(ids)
        target = pair.content("target", kv)
        cos, sin = pair.target.cos_sin(ids.shape[1])
        scaling = pair.target.geometry.rotary.scaling
        content = [rope.strip(q, cos, sin, scaling) for q in queries]
        named = {"source.keys": source.keys, "source.values": source.values}
        named |= {"target.keys": target.keys, "target.values": target.values, "target.queries": content}
        for name, layers in named.items():
            for layer, tensor in enumerate(layers):
                parts.setdefault(f"{name}.{layer}", []).append(tensor.cpu())
    tensors = {name: torch.cat(rows).contiguous() for name, rows in parts.items()}
    save_file({**tensors, "tokens": tokens.contiguous()}, path)


def merge_probes(shares: list[Path], rows: int, path: Path) -> None:
    """The first ``rows`` rows of the whole corpus from the probes of its shares (share i holds rows i, i + n, ...)."""
    parts = [load_file(share) for share in shares]
    order = [(row % len(parts), row // len(parts)) for row in range(rows)]
    save_file({name: torch.stack([parts[share][name][at] for share, at in order]) for name in parts[0]}, path)
