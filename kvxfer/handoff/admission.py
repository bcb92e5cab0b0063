"""Whether a map may be used at all: identity, plan and evidence, before anything is computed.

A pair is known by its record (``Pair.describe``): two loaded models are one way to have one, a server's config another.
So nothing here asks for weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.handoff.policy import MEASURED, Policy
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.evidence import Evidence
from kvxfer.maps.plan import Plan


@dataclass(frozen=True)
class Refusal:
    """Why nothing is handed over. ``reason`` is one word, ``why`` a sentence with what to do."""

    reason: str
    why: str


@dataclass(frozen=True)
class Admission:
    """What a map was found to be allowed.

    Attributes:
        unsupported: why this map can never be used with this pair and plan; None where it can.
        refusal: why it may not be used under the policy; None where it may.
        evidence: what admitted it.
        min_tokens: fewest tokens of a prompt that it is used for.
    """

    unsupported: Refusal | None = None
    refusal: Refusal | None = None
    evidence: Evidence | None = None
    min_tokens: int = 0


def admit(
    cache_map: CacheMap,
    pair: Mapping[str, Any],
    plan: Plan,
    evidence: Sequence[Evidence],
    policy: Policy,
    machine: Mapping[str, Any],
) -> Admission:
    """Whether a map may serve a pair under a plan.

    Args:
        pair: the record of what is to be served, as ``Pair.describe`` gives it.
        machine: the device, as ``kvxfer.models.machine`` names it.
    """
    try:
        cache_map.require(pair)
    except KvxferError as error:
        return Admission(unsupported=Refusal("identity", str(error)))
    try:
        plan.require_seen(cache_map.skip_first)
    except KvxferError as error:
        return Admission(unsupported=Refusal("plan", str(error)))
    if "norms" not in cache_map.manifest:
        why = "the map does not say how long keys and values were in its calibration: train it again"
        return Admission(unsupported=Refusal("no_norms", why))
    alike = [each for each in evidence if each.plan == _tokens(plan)]
    found = _meets(alike, len(evidence), policy)
    if isinstance(found, Refusal):
        return Admission(refusal=found)
    if policy.min_tokens != MEASURED:
        return Admission(evidence=found, min_tokens=int(policy.min_tokens))
    pays = _pays_from(alike, machine)
    if isinstance(pays, Refusal):
        return Admission(refusal=pays, evidence=found)
    return Admission(evidence=found, min_tokens=pays)


def _tokens(plan: Plan) -> dict[str, int]:
    return {"exact_first": plan.exact_first, "hold_back": plan.hold_back}


def _meets(alike: Sequence[Evidence], known: int, policy: Policy) -> Evidence | Refusal:
    """The latest evidence that meets a policy, or what the latest lacks."""
    asked = [each for each in alike if each.kind == "items"]
    if not asked:
        other = f"; there is evidence of other kinds or plans ({known})" if known else ""
        return Refusal("no_evidence", f"nothing was measured of this map under this plan{other}: run evaluate.py")
    found = [(each, _lacks(each, policy)) for each in asked]
    good = next((each for each, lack in found if lack is None), None)
    if good is not None:
        return good
    latest, lack = found[0]
    return Refusal("policy", f"evidence {latest.run} ({latest.task} on {latest.domain}): {lack}")


def _lacks(evidence: Evidence, policy: Policy) -> str | None:
    for key in ("task", "domain"):
        wanted, own = getattr(policy, key), getattr(evidence, key)
        if wanted not in (None, own):
            return f"its {key} is {own}, and policy.{key} asks for {wanted}"
    if evidence.items < policy.items:
        return f"{evidence.items} items were asked, and policy.items asks for {policy.items}"
    if policy.beats and evidence.verdict != "beats":
        return f"its verdict is {evidence.verdict!r}, and policy.beats asks that the source and all controls be beaten"
    if policy.metric not in evidence.metrics:
        return f"it has no {policy.metric}, which policy.metric asks for"
    value, low = evidence.metrics[policy.metric]
    if low < policy.at_least:
        return (
            f"{policy.metric} is {value:.3f} and at least {low:.3f} (95 %), and policy.at_least asks for "
            f"{policy.at_least:g}"
        )
    return None


def _pays_from(alike: Iterable[Evidence], machine: Mapping[str, Any]) -> int | Refusal:
    """From how many tokens on a handoff was measured to pay on this device."""
    here = {key: machine[key] for key in ("device", "name")}
    timed = next((each for each in alike if each.kind == "latency" and each.machine == here), None)
    if timed is None:
        why = f"policy.min_tokens=measured, and no handoff of this map was timed on {here['name']}: run eval=latency"
        return Refusal("not_timed", why)
    if timed.break_even is None:
        return Refusal("no_break_even", f"evidence {timed.run}: no length was measured at which a handoff pays here")
    return int(timed.break_even) + (timed.break_even % 1 > 0)
