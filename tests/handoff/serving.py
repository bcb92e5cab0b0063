"""A map that may be served: saved with what a fit records, and evidence that admits it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvxfer.handoff.policy import Policy
from kvxfer.handoff.serving import Handoff
from kvxfer.maps.artifact import EVIDENCE, CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from tests.random_maps import identity_map

ANY = Policy(min_tokens=0)


def prompt(tokens: int = 24, batch: int = 1) -> Tensor:
    return (torch.arange(tokens) * 7 + torch.arange(batch)[:, None] * 11) % 60 + 4


def norms(pair: Pair) -> dict[str, float]:
    """How long the target's own keys and values are."""
    kv = pair.content("target", pair.target.prefill(prompt(64)))
    parts = {"keys": kv.keys, "values": kv.values}
    return {
        f"{kind}.{layer}": float(part.square().sum(dim=(1, 3)).mean().sqrt())
        for kind, layers in parts.items()
        for layer, part in enumerate(layers)
    }


def saved(pair: Pair, folder: Path, cache_map: CacheMap | None = None) -> CacheMap:
    """A map of the pair in a folder; the one that changes nothing if none is given."""
    about = {"pair": pair.describe(), "norms": norms(pair), "calibrated_on": {"skip_first": 4}}
    folder.mkdir(parents=True, exist_ok=True)
    return replace(cache_map or identity_map(pair), manifest=about).save(folder)


def record(cache_map: CacheMap, **changed: Any) -> dict[str, Any]:
    """Evidence that meets the strict policy but for what is timed."""
    config = {"eval": {"name": changed.get("task", "mapped")}, "corpus": {"name": changed.get("domain", "toy")}}
    plan = {"name": "sinks", "exact_first": changed.get("exact_first", 4), "hold_back": 1}
    started = changed.get("started", "2026-01-01T00:00:00+00:00")
    found = {
        "map": cache_map.hash,
        "schema": 3,
        "kind": "items",
        "run_id": changed.get("run", "e1"),
        "verdict": {"kind": changed.get("verdict", "beats")},
        "provenance": {"config": config, "plan": plan, "started": started},
        "conditions": {"mapped": {"gap_recovered_nats": 0.9, "gap_recovered_nats_ci": changed.get("ci", [0.8, 1.0])}},
        "tests": {"mapped_vs_source": {"n": changed.get("items", 200), "documents": 100}},
    }
    if "break_even" in changed:
        timed = {"machine": changed["machine"], "break_even": [{"batch": 1, "warm": changed["break_even"]}]}
        found |= {"kind": "latency", "verdict": None, **timed}
    return found


def keep(folder: Path, *records: dict[str, Any]) -> None:
    (folder / EVIDENCE).mkdir(exist_ok=True)
    for each in records:
        (folder / EVIDENCE / f"{each['run_id']}.json").write_text(json.dumps(each))


def served(pair: Pair, folder: Path, policy: Policy = ANY, cache_map: CacheMap | None = None, **more: Any) -> Handoff:
    """A handoff that is admitted, of models that lie in folders."""
    keep(folder, record(saved(pair, folder, cache_map)))
    names = {"source": pair.source.name, "target": pair.target.name}
    return Handoff.from_pretrained(folder, **names, policy=policy, device="cpu", **more)


def greedy(pair: Pair, ids: Tensor, new: int = 8) -> list[int]:
    """What the target answers by itself."""
    return pair.target.generate(ids, None, new)[0].tolist()


def plan(exact_first: int = 4, hold_back: int = 1) -> Plan:
    return Plan("sinks", exact_first, hold_back)
