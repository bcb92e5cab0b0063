"""Committed results as ``tools.collect`` writes them, with as many maps of a given quality as a test needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.collect import SCHEMA

ITEMS, PER_DOCUMENT, TOKENS = 80, 2, 2
HELD_BACK = 0.04
"""What the target computes itself in a handoff, as a share of its prefill."""

LEVELS = {"ceiling": 1.0, "source": 2.0, "no_context": 3.5, "identity": 1.0, "floor": 5.0, "raw_copy": 4.0}


def scores(level: float, seed: int = 0, answers: bool = True) -> dict[str, Any]:
    """Scores whose mean is near a level of nats per token; items are as hard for one map as for another."""
    hardness = np.random.default_rng(7).normal(0, 0.3, ITEMS)
    hardness -= hardness.mean()
    own = np.random.default_rng(seed).normal(0, 0.02, ITEMS)
    nats = TOKENS * (level + hardness + own - own.mean())
    right = "".join(str(int(value < 4)) for value in nats) if answers else None
    return {"nats": [round(float(value), 5) for value in nats], "correct": right}


def make_map(level: float, number: int = 0, answers: bool = True, **given: Any) -> dict[str, Any]:
    """A map of some quality. ``given``: solver, penalty, rank, features (names), lam, alpha, r, metric, k, share, r2,
    rows, tokens, baseline, per_block, criterion. ``share`` is the map's own; a whole handoff costs HELD_BACK more.
    """
    rank = given.get("rank", "full")
    reduced = {"r": given.get("r", "auto"), "metric": given.get("metric", "isotropic")} if rank == "reduced" else {}
    penalty = {"name": given.get("penalty", "isotropic"), "lam": given.get("lam", "auto")}
    if given.get("per_block"):
        penalty |= {"per_block": True, "convention": "of each block"}
    if penalty["name"] == "attention":
        penalty["alpha"] = given.get("alpha", "auto")
    solver = {"name": given.get("solver", "ridge"), "k": given.get("k", 3), "method": "topk", "selection": "shared"}
    r2 = given.get("r2", 0.9)
    corpus = {"name": "toy", "seed": 0, "rows": {"fit": given.get("rows", 64)}}
    ids = {
        "evaluate": f"e{number:03}",
        "train": f"t{number:03}",
        "calibrate": "c",
        "baseline": given.get("baseline", "b"),
    }
    share = given.get("share", 0.05)
    return {
        "settings": {
            "solver": {**solver, "selection_lam": 0.001, "criterion": given.get("criterion", "r2"), "pool": 6},
            "penalty": penalty,
            "rank": {"name": rank, **reduced},
            "features": {"name": given.get("features", "same"), "kinds": "same", "previous": 0},
        },
        "chosen": {},
        "calibration": {
            "corpus": corpus,
            "features": "previous",
            "settings": {},
            "kept_tokens": given.get("tokens", 8000),
        },
        "cost": {
            "parameters": 1000,
            "bytes": 4000,
            "flops_per_token": 2000.0,
            "bytes_read_per_token": 96.0,
            "bytes_written_per_token": 128.0,
            "share_of_prefill_flops": share,
            "handoff_share_of_prefill_flops": share + HELD_BACK,
        },
        "columns": 400,
        "r2_held_out": {"keys": r2, "values": r2 - 0.1},
        "fit_seconds": 1.0,
        "runs": ids,
        "map": "0" * 64,
        "versions": {"evaluate": 1, "train": 2, "calibrate": 2},
        "commit": "abc",
        "scores": scores(level, number + 1, answers),
    }


def collected(
    maps: list[dict[str, Any]], pair: str = "toy", answers: bool = True, corpus: str = "toy", **levels: float
) -> dict[str, Any]:
    """A whole file; ``levels`` adds conditions to the baselines or changes them."""
    documents = [f"d{index // PER_DOCUMENT}" for index in range(ITEMS)]
    names = {**LEVELS, **levels}
    baseline = {
        "config": {"eval": {"name": "mapped"}, "corpus": {"name": corpus}},
        "items": {
            "id": [f"q{index}" for index in range(ITEMS)],
            "document": documents,
            "kind": ["where"] * ITEMS,
            "tokens": [TOKENS] * ITEMS,
        },
        "conditions": {name: scores(level, answers=answers) for name, level in names.items()},
    }
    used = {one["runs"]["baseline"] for one in maps} or {"b"}
    return {"schema": SCHEMA, "pair": {"name": pair}, "baselines": dict.fromkeys(sorted(used), baseline), "maps": maps}


def write(folder: Path, *files: dict[str, Any]) -> Path:
    """Files in a folder, named after their pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in files:
        (folder / f"{data['pair']['name']}.json").write_text(json.dumps(data))
    return folder
