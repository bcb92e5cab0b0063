"""What a handoff saves, from its parts: pure arithmetic, in seconds, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvxfer.evals.specs import LatencySpec
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.geometry import Geometry

GROUPS = {
    "mapping": ("map",),
    "transport": ("export",),
    "delivery": ("inject",),
    "own": ("exact", "held_back", "first_decode"),
}
"""The formula's terms, by the steps that they are made of; ``own`` are the tokens that the target reads itself."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def compare(handoff: Sequence[float], prefill: Sequence[float]) -> dict[str, Any]:
    """Saving of paired rounds: the median of prefill minus handoff with its 95 % interval, and the ratio of medians.

    The interval is between order statistics (scipy's quantile test): it holds whatever the times' distribution. It is
    None below 6 rounds, which cannot give one.
    """
    saved = np.asarray(prefill) - np.asarray(handoff)
    bounds = stats.quantile_test(saved, q=0, p=0.5).confidence_interval(0.95)
    known = bool(np.isfinite([bounds.low, bounds.high]).all())
    return {
        "saving": float(np.median(saved)),
        "ci": [float(bounds.low), float(bounds.high)] if known else None,
        "ratio": float(np.median(prefill) / np.median(handoff)),
    }


def break_even(lengths: Sequence[int], savings: Sequence[float]) -> float | None:
    """The length from which on every longer one that was measured saves time, interpolated; None if the last does not.

    The shortest length itself where all of them save time.
    """
    points = sorted(zip(lengths, savings, strict=True))
    losing = [n for n, (_, saving) in enumerate(points) if saving <= 0]
    if not losing:
        return float(points[0][0])
    if losing[-1] == len(points) - 1:
        return None
    (short, below), (long, above) = points[losing[-1]], points[losing[-1] + 1]
    return short + (long - short) * -below / (above - below)


def savings(
    seconds: Mapping[str, float],
    batch: int,
    wire: float,
    load: float,
    fit: float | None,
    map_bytes: float,
    acceptance: float,
    rates: LatencySpec,
) -> dict[str, float | None]:
    """The formula's terms and what is left, in seconds a handoff (times of a batch are shared by its prompts).

    ``saving = prefill - mapping - transport - delivery - own - load / handoffs - (1 - acceptance) prefill``: a handoff
    that is rejected costs itself, as if it was found out at the end, and the prefill that it should have saved. An
    accepted one also carries its share of rejected ones, of shadow runs (which cost a handoff and save nothing) and of
    the fit: ``((1 - s) saving - s (handoff + load)) / ((1 - s) acceptance) - fit / handoffs_per_fit``.

    Args:
        seconds: of the steps and of ``target``, for the whole batch.
        wire: seconds that the source's caches travel, for the whole batch.
        load, fit: seconds to load the map and to calibrate and fit it (None: unknown, and left out).
        rates: ``handoffs`` for each load of the map, ``handoffs_per_fit`` for each fit of it, and ``shadow_rate``, the
            share of requests whose mapped cache is only compared with the target's own.
    """
    terms = {group: sum(seconds[step] for step in steps) / batch for group, steps in GROUPS.items()}
    terms["transport"] += wire / batch
    prefill, share = seconds["target"] / batch, load / rates.handoffs
    fallback = (1 - acceptance) * prefill
    spent = sum(terms.values()) + share
    saving = prefill - spent - fallback
    s = rates.shadow_rate
    accepted = ((1 - s) * saving - s * spent) / ((1 - s) * acceptance)
    accepted -= 0.0 if fit is None else fit / rates.handoffs_per_fit
    return {
        "acceptance": acceptance,
        "prefill": prefill,
        **terms,
        "load": share,
        "fallback": fallback,
        "saving": saving,
        "fit": None if fit is None else fit / rates.handoffs_per_fit,
        "storage_bytes": map_bytes / rates.handoffs_per_fit,
        "per_accepted": accepted,
    }


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes moved to and from memory, that cannot be avoided."""

    flops: float
    bytes: float

    def roof(self, flops: float, bandwidth: float) -> dict[str, Any]:
        """The least seconds at a machine's peak FLOP/s and bytes/s, and which of them binds."""
        compute, memory = self.flops / flops, self.bytes / bandwidth
        return {
            "flops": self.flops,
            "bytes": self.bytes,
            "roof": max(compute, memory),
            "bound": "compute" if compute >= memory else "memory",
        }


def map_work(
    cache_map: CacheMap, tokens: int, batch: int, width: int, weight: int, source: float, target: float
) -> Work:
    """The way from cache to cache: weights read once, the source's cache read, the target's written.

    Args:
        width: bytes of a number of the caches.
        weight: bytes of a number of the map.
        source, target: how many times more layers the whole models have than those that are mapped.
    """
    rows = tokens * batch
    weights = weight * cache_map.parameters * target
    # The map counts two bytes for each number.
    cached = cache_map.bytes_read_per_token * source + cache_map.bytes_written_per_token * target
    return Work(cache_map.flops_per_token * target * rows, float(weights + cached / 2 * width * rows))


def prefill_work(geometry: Geometry, tokens: int, batch: int, width: int, first_token: bool) -> Work:
    """A prefill: weights once, the cache written; with ``first_token`` also the vocabulary projection of one token."""
    projection = geometry.hidden * geometry.vocabulary if first_token else 0
    flops = geometry.prefill_flops(tokens) * tokens * batch + 2 * projection * batch
    cache = 2 * geometry.layers * geometry.kv_width * tokens * batch
    return Work(float(flops), float(width * (geometry.body_parameters + projection + cache)))
