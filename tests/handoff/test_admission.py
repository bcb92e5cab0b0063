"""Admission: what a map must have shown, and for which pair, before anything is handed over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import KvxferError
from kvxfer.handoff.admission import Admission, admit
from kvxfer.handoff.policy import Policy
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.evidence import Evidence, read_evidence
from kvxfer.models.pair import Pair
from tests.handoff.serving import ANY, keep, plan, record, saved

HERE = {"device": "cpu", "name": "a processor", "threads": 2}
Folder = tuple[CacheMap, Path]


@pytest.fixture(scope="module")
def kept(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("map")
    return saved(tiny_pair, folder), folder


def asked(kept: Folder, pair: Pair, policy: Policy = ANY, exact_first: int = 4, **changed: Any) -> Admission:
    cache_map, _ = kept
    evidence = [Evidence.of(record(cache_map, **changed), "here")]
    return admit(cache_map, pair.describe(), plan(exact_first), evidence, policy, HERE)


def test_admission_of_what_meets_the_policy(kept: Folder, tiny_pair: Pair) -> None:
    found = asked(kept, tiny_pair)
    assert found.unsupported is None
    assert found.refusal is None
    assert found.evidence is not None
    assert found.evidence.run == "e1"
    assert found.min_tokens == 0


@pytest.mark.parametrize(
    ("policy", "changed", "why"),
    [
        ({"task": "choices"}, {}, "its task is mapped, and policy.task asks for choices"),
        ({"domain": "stdlib"}, {}, "its domain is toy, and policy.domain asks for stdlib"),
        ({"items": 201}, {}, "200 items were asked, and policy.items asks for 201"),
        ({}, {"verdict": "none"}, "its verdict is 'none'"),
        ({"metric": "retention"}, {}, "it has no retention"),
        (
            {"at_least": 0.85},
            {},
            "gap_recovered_nats is 0.900 and at least 0.800 (95 %), and policy.at_least asks for 0.85",
        ),
    ],
)
def test_admission_needs_evidence_that_meets_the_policy(
    policy: dict[str, Any], changed: dict[str, Any], why: str, kept: Folder, tiny_pair: Pair
) -> None:
    found = asked(kept, tiny_pair, Policy(min_tokens=0, **policy), **changed)
    assert found.refusal is not None
    assert found.refusal.reason == "policy"
    assert why in found.refusal.why


def test_admission_is_of_the_plan_that_was_measured(kept: Folder, tiny_pair: Pair) -> None:
    found = asked(kept, tiny_pair, exact_first=6)
    assert found.refusal is not None
    assert found.refusal.reason == "no_evidence"
    assert "other kinds or plans (1)" in found.refusal.why
    # First tokens that the map never saw are mapped by no plan, whatever was measured.
    assert asked(kept, tiny_pair, exact_first=3).unsupported is not None


def test_admission_takes_older_evidence_where_the_latest_is_about_something_else(kept: Folder, tiny_pair: Pair) -> None:
    cache_map, _ = kept
    older = Evidence.of(record(cache_map, run="e1"), "here")
    later = Evidence.of(record(cache_map, run="e2", items=3, started="2026-02-01T00:00:00+00:00"), "here")
    found = admit(cache_map, tiny_pair.describe(), plan(), [later, older], ANY, HERE)
    assert found.evidence is not None
    assert found.evidence.run == "e1"


def test_admission_of_a_length_that_was_measured_to_pay(kept: Folder, tiny_pair: Pair) -> None:
    cache_map, _ = kept
    good = Evidence.of(record(cache_map), "here")

    def found(**changed: Any) -> Admission:
        timed = [Evidence.of(record(cache_map, run="l1", **changed), "here")] if changed else []
        return admit(cache_map, tiny_pair.describe(), plan(), [good, *timed], Policy(), HERE)

    assert found(machine=HERE, break_even=311.5).min_tokens == 312
    for refused, reason in (
        (found(), "not_timed"),
        (found(machine={**HERE, "name": "another"}, break_even=300.0), "not_timed"),
        (found(machine=HERE, break_even=None), "no_break_even"),
    ):
        assert refused.refusal is not None
        assert refused.refusal.reason == reason


@pytest.mark.parametrize(
    "path",
    [
        ("source", "sha256"),
        ("target", "sha256"),
        ("tokenizer",),
        ("dtype",),
        ("direction",),
        ("target", "geometry", "layers"),
        ("source", "geometry", "rotary", "theta"),
    ],
)
def test_admission_compares_every_part_of_the_identity(path: tuple[str, ...], kept: Folder, tiny_pair: Pair) -> None:
    """A record is enough: no weights are asked for."""
    cache_map, _ = kept
    other = copy.deepcopy(tiny_pair.describe())
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    assert path[-1] in inner
    inner[path[-1]] = "other"
    found = admit(cache_map, other, plan(), [Evidence.of(record(cache_map), "here")], ANY, HERE)
    assert found.unsupported is not None
    assert found.unsupported.reason == "identity"
    assert ".".join(path) in found.unsupported.why


def test_evidence_is_of_this_map_and_read_from_named_folders(kept: Folder, tmp_path: Path) -> None:
    cache_map, folder = kept
    keep(folder, record(cache_map, run="own"), record(cache_map, run="x") | {"map": "of another"})
    keep(tmp_path, record(cache_map, run="named"))
    found = read_evidence(folder, cache_map.hash, [tmp_path / "evidence"])
    assert {each.run for each in found} == {"own", "named"}
    with pytest.raises(KvxferError, match="no folder"):
        read_evidence(folder, cache_map.hash, [tmp_path / "missing"])
    keep(tmp_path, record(cache_map, run="old") | {"schema": 2})
    with pytest.raises(KvxferError, match=r"old\.json: evidence of schema 2 is not 3"):
        read_evidence(folder, cache_map.hash, [tmp_path / "evidence"])
    keep(tmp_path, {"map": cache_map.hash, "schema": 3, "run_id": "old"})
    with pytest.raises(KvxferError, match=r"old\.json is no evidence"):
        read_evidence(folder, cache_map.hash, [tmp_path / "evidence"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("at_leest: 0.5", "policy has no key at_leest"),
        ("- 3", "this is list"),
        ("at_least: high", "policy.at_least='high' is not a whole number or a number"),
        ("beats: 1", "policy.beats=1 is not true or false"),
        ("items: true", "policy.items=True is not a whole number"),
        ("min_tokens: some", "must be a number of tokens, 0 or more, or measured"),
        ("metric: r2", "policy.metric=r2 is none of accuracy"),
        ("shadow: 1.5", "a share between 0 and 1"),
        ("deadline_ms: 0", "must be above 0"),
        ("norms: 0.5", "policy.norms=0.5 must be 1 or more"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_policy_that_says_nothing_clear_is_refused(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(KvxferError) as error:
        Policy.read(file)
    assert why in str(error.value)


def test_a_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("metric: retention\nat_least: 0.95\nmin_tokens: 512\ndeadline_ms: 40\n")
    assert Policy.read(file) == Policy(metric="retention", at_least=0.95, min_tokens=512, deadline_ms=40.0)
    file.write_text("")
    assert Policy.read(file) == Policy()
    with pytest.raises(KvxferError, match="policy"):
        Policy.read(tmp_path / "missing.yaml")
