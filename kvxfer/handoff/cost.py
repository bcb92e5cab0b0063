"""What a whole handoff costs against the prefill that it replaces, in FLOPs."""

from __future__ import annotations

from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.geometry import Geometry


def handoff_flops(cache_map: CacheMap, target: Geometry, plan: Plan, prompt: int) -> float:
    """FLOPs of a handoff of ``prompt`` tokens: the target's own first and last ones, and the map for those between.

    Counted as ``Geometry.prefill_flops`` counts a prefill: without the vocabulary projection. A held-back token attends
    to all that came before it.
    """
    first, stop = plan.mapped_span(prompt)

    def read(tokens: int) -> float:
        return target.prefill_flops(tokens) * tokens if tokens else 0.0

    held_back = read(prompt) - read(stop)
    return read(first) + cache_map.flops_per_token * (stop - first) + held_back


def new_tokens_share(cache_map: CacheMap, target: Geometry, start: int, stop: int, mapped: int) -> float:
    """FLOPs to bring a target from ``start`` to ``stop`` tokens of a text, so many of them mapped, as a share of its
    own reading of them; each that it reads is counted as their mean."""

    def read(tokens: int) -> float:
        return target.prefill_flops(tokens) * tokens if tokens else 0.0

    own = (read(stop) - read(start)) / (stop - start)
    return (mapped * cache_map.flops_per_token + (stop - start - mapped) * own) / ((stop - start) * own)


def handoff_share(cache_map: CacheMap, target: Geometry, plan: Plan, prompt: int) -> float:
    """The same as a share of the target's own prefill of all of it."""
    return handoff_flops(cache_map, target, plan, prompt) / (target.prefill_flops(prompt) * prompt)
