"""A training from start to end."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvxfer.pairs import Pair
from tests.trainings import Told, fit


def test_a_training(tiny_pair: Pair, tmp_path: Path) -> None:
    out = Told()
    found = fit(tiny_pair, tmp_path, out=out)
    record = found.record
    print(json.dumps(record, indent=1)[:6000])
    print(out.numbers[:3], out.tables.keys(), out.figures, out.artifacts)
    assert record["steps"] == 6
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
