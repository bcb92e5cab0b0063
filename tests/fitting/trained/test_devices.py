"""Several devices share a training; one after the other would give the same map."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.models.pair import Pair
from tests.trainings import Told, fit


def fit_as(rank: int, port: int, pair: Pair, work: Path, told: Path, settings: dict[str, Any]) -> None:
    """Train as one of two processes that something else has started, and write down what came of it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    out = Told()
    found = fit(pair, work, out=out, devices=2, **settings)
    weights = {str(output): layer.weight for output, layer in found.layers.items()}
    torch.save({"weights": weights, "history": found.record["history"], "told": len(out.numbers)}, told)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_devices_give_nearly_the_map_of_one(tiny_pair: Pair, tmp_path: Path) -> None:
    alone = fit(tiny_pair, tmp_path / "alone", max_steps=3)
    port, children = free_port(), []
    told = [tmp_path / f"{rank}.pt" for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for rank in range(2):
            given = (rank, port, tiny_pair, tmp_path / "both", told[rank], {"max_steps": 3})
            children.append(multiprocessing.get_context("fork").Process(target=fit_as, args=given, daemon=True))
            children[-1].start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    first, second = (torch.load(path, weights_only=True) for path in told)
    assert first["told"] > 0
    assert second["told"] == 0
    assert [look["step"] for look in first["history"]] == [2, 3]
    assert sorted(path.name for path in (tmp_path / "both" / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    for output, layer in alone.layers.items():
        assert torch.equal(first["weights"][str(output)], second["weights"][str(output)])
        assert torch.allclose(first["weights"][str(output)], layer.weight, atol=1e-4)
    for look, expected in zip(first["history"], alone.record["history"], strict=True):
        assert look["val_kl"] == pytest.approx(expected["val_kl"], rel=1e-3)


def test_a_rate_is_found_on_one_device(tiny_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(KvxferError, match=r"trainer.lr=auto looks on one device only"):
        fit(tiny_pair, tmp_path, lr="auto", devices=2)
