"""``kvxfer generate``: one prompt, read by the source, answered by the target."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError, file_error
from kvxfer.report.console import say

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from kvxfer.handoff.record import HandoffRecord
    from kvxfer.handoff.serving import Handoff


def generate(arguments: Sequence[str]) -> None:
    """The command; exits with 1 and one line on a mistake."""
    parser = argparse.ArgumentParser(
        "kvxfer generate",
        description="Let the source read a prompt, hand its cache over, and print the target's answer as it comes; "
        "then what became of the handoff, and what it saved.",
    )
    parser.add_argument("map", type=Path, help="the folder of a map: outputs/train/<run id>")
    parser.add_argument("--prompt", help="the prompt (default: standard input)")
    parser.add_argument("--source", required=True, help="a hub id, or the folder of a saved model")
    parser.add_argument("--target", required=True, help="the same of the model that answers")
    parser.add_argument("--policy", type=Path, help="a YAML file (default: the strict policy)")
    parser.add_argument("--evidence", type=Path, nargs="*", default=[], help="more folders with evidence of the map")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens of the answer (default: 64)")
    parser.add_argument("--log", type=Path, help="a file that a JSON line about the handoff is added to")
    given = parser.parse_args(arguments)
    prompt = sys.stdin.read() if given.prompt is None else given.prompt
    try:
        # --help needs none of it.
        serving = importlib.import_module("kvxfer.handoff.serving")
        models = {"source": given.source, "target": given.target}
        about = {"policy": given.policy, "evidence": given.evidence, "log": given.log}
        handoff = serving.Handoff.from_pretrained(given.map, **models, **about)
        hand_over(handoff, prompt, given.max_new_tokens)
    except Exception as error:
        if (told := error if isinstance(error, KvxferError) else file_error(error)) is None:
            raise
        sys.exit(f"error: {told}")


def hand_over(handoff: Handoff, prompt: str | Int[Tensor, "1 tokens"], most: int) -> None:
    """Print an answer as it comes, and then what became of the handoff and what it saved or lost."""
    for piece in handoff.stream(prompt, most):
        if isinstance(piece, str):
            say(piece, end="")
        else:
            say("", *_told(handoff, prompt, piece.record))


def _told(handoff: Handoff, prompt: str | Int[Tensor, "1 tokens"], record: HandoffRecord) -> list[str]:
    """Lines about a handoff beside the target's own prefill of the same prompt, which is timed here."""
    ids = handoff.tokens(prompt).to(handoff.pair.target.device)
    started = time.perf_counter()
    handoff.pair.target.begin(ids[:, :-1])
    own, took = 1000 * (time.perf_counter() - started), sum(record.milliseconds.values())
    reason = "" if record.reason is None else f" ({record.reason}: {record.why})"
    lines = [f"status: {record.status}{reason}"]
    if record.status == "applied":
        saved = own - took
        lines += [
            f"tokens: {record.mapped} mapped, {record.exact} read by the target",
            f"time: {took:.1f} ms to hand over, {own:.1f} ms for the target's own prefill: "
            f"{abs(saved):.1f} ms {'saved' if saved > 0 else 'lost'}",
            f"FLOPs: {100 * record.flops_share:.1f} % of that prefill's, {100 * (1 - record.flops_share):.1f} % saved",
        ]
    else:
        lines.append(f"tokens: {record.exact} read by the target, in {took:.1f} ms")
    return lines
