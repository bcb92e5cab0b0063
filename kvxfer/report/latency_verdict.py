"""Does a handoff save time? One sentence, from the paired rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvxfer.evals.evaluation import Data
from kvxfer.evals.latency.costs import outcome
from kvxfer.report.tables import number
from kvxfer.report.verdict import Verdict

Point = Mapping[str, Any]


def latency_verdict(data: Data) -> Verdict:
    """For the smallest batch: at which lengths the handoff saves time once the source has run, and from nothing."""
    batch = min(point["batch"] for point in data["points"])
    points = [point for point in data["points"] if point["batch"] == batch]
    warm = [outcome(point["warm"]) for point in points]
    kind: Literal["beats", "none", "worse", "mixed"] = "mixed"
    if len(set(warm)) == 1:
        kinds: dict[int, Literal["beats", "none", "worse"]] = {1: "beats", 0: "none", -1: "worse"}
        kind = kinds[warm[0]]
    heads = {
        "beats": "The handoff saves time",
        "worse": "The handoff costs more time than it saves",
        "none": "It is not shown that the handoff saves time",
        "mixed": "The handoff saves time at some lengths only",
    }
    said = f"{heads[kind]}. Once the source has run, it {_where(points, 'warm')}; "
    said += f"with the source's prefill counted too (cold), it {_where(points, 'cold')}"
    end = f" (batches of {batch})" if batch > 1 else ""
    return Verdict(kind, heads[kind], f"{said}{end}.{_caution(data)}")


def _where(points: Sequence[Point], way: str) -> str:
    """At which lengths a way reaches the first token sooner, and at which it does not."""
    by = {n: [point for point in points if outcome(point[way]) == n] for n in (1, 0, -1)}
    parts = []
    if by[1]:
        ratios = [point[way]["ratio"] for point in by[1]]
        low, high = number(min(ratios), 2), number(max(ratios), 2)
        times = low if low == high else f"{low} to {high}"
        parts.append(f"reaches the target's first token {times} times as fast as the target's prefill {_at(by[1])}")
    if by[-1]:
        ratios = [1 / point[way]["ratio"] for point in by[-1]]
        low, high = number(min(ratios), 2), number(max(ratios), 2)
        times = low if low == high else f"{low} to {high}"
        parts.append(f"takes {times} times as long {_at(by[-1])}")
    if by[0]:
        parts.append(f"shows no difference {_at(by[0])}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _at(points: Sequence[Point]) -> str:
    lengths = [str(point["length"]) for point in points]
    listed = " and ".join([", ".join(lengths[:-1]), lengths[-1]] if len(lengths) > 1 else lengths)
    return f"at {listed} tokens"


def _caution(data: Data) -> str:
    """What the times are not: of trained weights, of whole models."""
    parts = []
    if data["random"]:
        parts.append("weights are random, so this is about time alone")
    if data["scaled"]:
        parts.append(f"times are scaled from {slices(data)}")
    return f" {'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}." if parts else ""


def slices(data: Data) -> str:
    """What of the models was timed."""
    return " and ".join(f"{timed} of the {side}'s {whole} layers" for side, (timed, whole) in data["scaled"].items())
