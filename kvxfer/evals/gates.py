"""Checks on the models being measured, before anything is recorded: is an injected cache really used, and exactly?"""

from __future__ import annotations

from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.items import Batch
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.models.pair import Pair

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Nats per token by which a target may differ when it goes on from its own cache."""

CACHE_MATTERS = 2.0
"""A zeroed cache must change the scores by at least this many times the tolerance."""


@torch.inference_mode()
def run_gates(pair: Pair, batch: Batch) -> list[dict[str, Any]]:
    """Score one batch's answers on the target's own cache in three ways.

    - identity: the target's cache, taken out and put back, scores as a plain forward does.
    - oracle: so does one that went through content space and back.
    - zeroed cache: one that holds nothing scores differently, or the cache is not read at all.

    Raises:
        KvxferError: a gate fails; nothing is to be recorded then.
    """
    answers = torch.tensor([item.answer for item in batch.items])
    head, tail = batch.prompt[:, :-1], batch.prompt[:, -1:]
    own = pair.target.prefill(head)
    through = pair.rotated("target", pair.content("target", own))
    plain = token_log_likelihoods(Prepared(pair.target, None, batch.prompt), answers)

    def change(past: Any) -> float:
        return float((token_log_likelihoods(Prepared(pair.target, past, tail), answers) - plain).abs().mean())

    tolerance = TOLERANCE[pair.target.dtype]
    least = CACHE_MATTERS * tolerance
    gates = [
        _gate("identity", change(own), tolerance, below=True),
        _gate("oracle", change(through), tolerance, below=True),
        _gate("zeroed cache", change(own.zeros()), least, below=False),
    ]
    for gate in gates:
        if not gate["passed"]:
            wanted = "at least" if gate["name"] == "zeroed cache" else "at most"
            raise KvxferError(
                f"gate {gate['name']!r} failed: scores change by {gate['value']:.2g} nats per token, {wanted} "
                f"{gate['tolerance']:.2g} is expected in {pair.spec.dtype}; nothing was recorded; "
                "try pair.dtype=float32"
            )
    return gates


def _gate(name: str, value: float, tolerance: float, below: bool) -> dict[str, Any]:
    passed = value <= tolerance if below else value >= tolerance
    return {"name": name, "value": value, "tolerance": tolerance, "passed": bool(passed)}
