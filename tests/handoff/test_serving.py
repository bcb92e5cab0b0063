"""The handoff in front of people: a fallback is the target's own answer, whatever went wrong, and says what it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.handoff import serving
from kvxfer.handoff.breaker import Breaker
from kvxfer.handoff.serving import Answer, Handoff
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import MANIFEST, TENSORS
from kvxfer.maps.blocks import DESIGNS
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.handoff.serving import ANY, greedy, keep, plan, prompt, record, saved, served
from tests.random_maps import identity_map, random_map

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def itself(tiny_pair: Pair) -> Pair:
    """The target as its own source, for which a map can be exact."""
    return replace(tiny_pair, source=tiny_pair.target)


@pytest.fixture(scope="module")
def wrong(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Handoff:
    """A map that changes every answer, admitted by what somebody says of it: whatever leaks of it shows."""
    cache_map = random_map(tiny_pair, DESIGNS["same"])
    policy = replace(ANY, norms=1e9, failures=1000)
    return served(tiny_pair, tmp_path_factory.mktemp("wrong"), policy, cache_map)


def given(handoff: Handoff, tokens: int = 24) -> Any:
    """The source's cache, as the library holds it."""
    return handoff.pair.source.begin(prompt(tokens)[:, :-1]).cache


def test_a_handoff_of_an_exact_map_is_the_target(itself: Pair, tmp_path: Path) -> None:
    handoff = served(itself, tmp_path)
    handed = handoff.transfer(given(handoff), prompt())
    assert handed.record.status == "applied"
    assert (handed.record.mapped, handed.record.exact) == (19, 5)
    assert set(handed.record.milliseconds) == {"export", "exact", "map", "check", "inject"}
    # The library's own generate goes on from it.
    found = handoff.pair.target.lm.generate(**handed.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found[0, 24:].tolist() == greedy(itself, prompt())
    assert handoff.generate(prompt(), 8).ids.tolist() == greedy(itself, prompt())


def test_a_handoff_gives_what_evaluations_hand_over(wrong: Handoff) -> None:
    """Both call one transfer: the served cache is that of every figure about the map."""
    handed = wrong.transfer(given(wrong), prompt())
    assert handed.record.status == "applied"
    transfer, head = wrong._transfer, prompt()[:, :-1]
    assert transfer is not None
    expected = transfer.handed(wrong.pair.source.prefill(head), head, transfer.exact(head))
    for layer, (keys, values) in enumerate(zip(expected.keys, expected.values, strict=True)):
        assert torch.equal(handed.cache.layers[layer].keys, keys)
        assert torch.equal(handed.cache.layers[layer].values, values)
    assert wrong.generate(prompt(), 8).ids.tolist() != greedy(wrong.pair, prompt()), "or a fallback could not be told"


def test_a_handoff_of_a_shorter_cache_leaves_the_rest_to_the_target(itself: Pair, tmp_path: Path) -> None:
    handoff = served(itself, tmp_path)
    handed = handoff.transfer(itself.source.begin(prompt()[:, :15]).cache, prompt())
    assert (handed.record.mapped, handed.record.exact) == (11, 13)
    found = handoff.pair.target.lm.generate(**handed.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found[0, 24:].tolist() == greedy(itself, prompt())


def test_a_handoff_of_several_prompts(itself: Pair, tmp_path: Path) -> None:
    handoff, ids = served(itself, tmp_path), prompt(batch=3)
    handed = handoff.transfer(itself.source.begin(ids[:, :-1]).cache, ids)
    assert (handed.record.status, handed.record.mapped) == ("applied", 57)
    found = handoff.pair.target.lm.generate(**handed.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found[:, 24:].tolist() == itself.target.generate(ids, None, 8).tolist()
    with pytest.raises(KvxferError, match="one prompt at a time"):
        handoff.generate(ids)


def nan_in_a_layer(kv: KV) -> KV:
    keys = [part.clone() for part in kv.keys]
    keys[1][:, :, 9] = float("nan")
    return replace(kv, keys=keys)


CACHES: dict[str, tuple[Change, str]] = {
    "nan": (nan_in_a_layer, "not_finite"),
    "huge": (lambda kv: kv.apply(lambda x: x * 1e6), "norms"),
    "overflow": (lambda kv: kv.apply(lambda x: x * 1e38), "not_finite"),
    "another layer count": (lambda kv: KV(kv.keys[:-1], kv.values[:-1]), "cache_shape"),
    "other heads": (lambda kv: kv.apply(lambda x: x[:, :1]), "cache_shape"),
    "longer than the prompt": (lambda kv: kv.apply(lambda x: torch.cat([x, x], dim=2)), "cache_length"),
    "nothing to map": (lambda kv: kv.span(0, 3), "too_short"),
    "no cache at all": (lambda kv: None, "error"),
}


@pytest.mark.parametrize("fault", CACHES)
def test_fallback_for_a_cache_that_is_wrong(fault: str, itself: Pair, tmp_path: Path) -> None:
    change, reason = CACHES[fault]
    handoff = served(itself, tmp_path)
    cache = change(itself.source.prefill(prompt()[:, :-1]))
    handed = handoff.transfer(cache, prompt())
    assert (handed.record.status, handed.record.reason) == ("fallback", reason), handed.record.why
    found = handoff.pair.target.lm.generate(**handed.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found[0, 24:].tolist() == greedy(itself, prompt())
    assert handoff.generate(prompt()).record.status == "applied", "the next one is as good as any"


STEPS = {
    "export": (serving, "read_cache"),
    "exact": (Transfer, "exact"),
    "map": (Mapper, "run"),
    "handed": (Transfer, "handed"),
    "check": (Handoff, "check"),
    "inject": (serving, "build_cache"),
}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("broken"), "error"),
        (torch.OutOfMemoryError("no memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
    ],
    ids=["exception", "device memory", "memory"],
)
@pytest.mark.parametrize("step", STEPS)
def test_fallback_is_exact_when_a_step_fails(
    step: str, error: Exception, reason: str, wrong: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **named: Any) -> Any:
        raise error

    cache = given(wrong)
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], broken)
        handed = wrong.transfer(cache, prompt())
    assert (handed.record.status, handed.record.reason) == ("fallback", reason)
    assert handed.record.mapped == 0
    found = wrong.pair.target.lm.generate(**handed.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found[0, 24:].tolist() == greedy(wrong.pair, prompt())


def test_fallback_when_the_source_fails(wrong: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("the source is gone")

    monkeypatch.setattr(Transfer, "prefill", broken)
    answer = wrong.generate(prompt(), 8)
    assert (answer.record.reason, answer.record.why) == ("error", "RuntimeError: the source is gone")
    assert answer.ids.tolist() == greedy(wrong.pair, prompt())


def test_fallback_at_the_deadline_which_is_looked_at_between_chunks(
    wrong: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves with every chunk: the pass ends within, not after all of it."""
    now = [0.0]
    chunks = []
    inner = Mapper._chunks

    def small(self: Mapper, batch: int, first: int, tokens: int) -> Any:
        for start in range(first, tokens, 4):
            now[0] += 0.010
            chunks.append(start)
            yield slice(0, batch), slice(start, min(start + 4, tokens))

    assert inner is not small
    monkeypatch.setattr(Mapper, "_chunks", small)
    slow = Handoff(
        wrong.pair, wrong._map, plan(), wrong.admission, replace(wrong.policy, deadline_ms=25.0), clock=lambda: now[0]
    )
    answer = slow.generate(prompt(40), 8)
    assert (answer.record.status, answer.record.reason) == ("fallback", "deadline")
    assert len(chunks) == 3, "of nine"
    assert answer.ids.tolist() == greedy(wrong.pair, prompt(40))


def altered(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS).write_bytes(data)


def other_manifest(key: str, value: Any) -> Change:
    """Somebody's edit, with the hashes put right: it is the comparison with the pair that must find it."""

    def change(folder: Path) -> None:
        from kvxfer.maps.artifact import CacheMap

        found = CacheMap.load(folder)
        manifest = json.loads(json.dumps(found.manifest))
        inner, (*path, last) = manifest["pair"], key.split(".")
        for part in path:
            inner = inner[part]
        inner[last] = value
        replace(found, manifest=manifest).save(folder)

    return change


ARTIFACTS: dict[str, tuple[Change, str]] = {
    "altered": (altered, "artifact"),
    "truncated": (lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-9]), "artifact"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "artifact"),
    "another theta": (other_manifest("target.geometry.rotary.theta", 5.0), "identity"),
    "another tokenizer": (other_manifest("tokenizer", "0" * 64), "identity"),
    "another layer count": (other_manifest("source.geometry.layers", 9), "identity"),
    "another source": (other_manifest("source.sha256", "0" * 64), "identity"),
}


@pytest.mark.parametrize("fault", ARTIFACTS)
def test_fallback_for_a_map_that_is_not_this_pair_s(fault: str, tiny_pair: Pair, tmp_path: Path) -> None:
    change, reason = ARTIFACTS[fault]
    cache_map = saved(tiny_pair, tmp_path, random_map(tiny_pair, DESIGNS["same"]))
    keep(tmp_path, record(cache_map))
    change(tmp_path)
    names = {"source": tiny_pair.source.name, "target": tiny_pair.target.name}
    # A map that can't be read does not say how its models are run.
    if reason == "artifact" and not (tmp_path / MANIFEST).exists():
        tiny_pair = replace(tiny_pair, spec=replace(tiny_pair.spec, dtype="bfloat16"))
    handoff = Handoff.from_pretrained(tmp_path, **names, policy=ANY, device="cpu")
    answer = handoff.generate(prompt(), 8)
    assert (answer.record.status, answer.record.reason) == ("unsupported", reason), answer.record.why
    assert answer.ids.tolist() == greedy(handoff.pair, prompt())


def test_fallback_without_evidence_or_below_the_length_that_pays(tiny_pair: Pair, tmp_path: Path) -> None:
    cache_map = saved(tiny_pair, tmp_path, random_map(tiny_pair, DESIGNS["same"]))
    names = {"source": tiny_pair.source.name, "target": tiny_pair.target.name, "device": "cpu"}
    bare = Handoff.from_pretrained(tmp_path, **names, policy=ANY).generate(prompt(), 8)
    assert (bare.record.status, bare.record.reason) == ("fallback", "no_evidence")
    keep(tmp_path, record(cache_map))
    short = Handoff.from_pretrained(tmp_path, **names, policy=replace(ANY, min_tokens=25)).generate(prompt(), 8)
    assert (short.record.reason, short.record.exact) == ("too_short", 24)
    untimed = Handoff.from_pretrained(tmp_path, **names).generate(prompt(), 8)
    assert untimed.record.reason == "not_timed"
    for answer in (bare, short, untimed):
        assert answer.ids.tolist() == greedy(tiny_pair, prompt())


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fallback_of_prompts_that_leave_nothing_to_map(tokens: int, wrong: Handoff) -> None:
    answer = wrong.generate(prompt(tokens), 8)
    assert answer.record.reason == "too_short"
    assert answer.ids.tolist() == greedy(wrong.pair, prompt(tokens))


def test_fallback_of_a_prompt_longer_than_the_source_reads(wrong: Handoff) -> None:
    limit = wrong.pair.longest_context
    handed = wrong.transfer(None, prompt(limit + 1))
    assert handed.record.reason == "too_long"
    assert handed.cache.get_seq_length() == limit


def test_a_handoff_in_shadow_serves_the_target_s_own_answer(wrong: Handoff, itself: Pair, tmp_path: Path) -> None:
    shadowed = Handoff(wrong.pair, wrong._map, plan(), wrong.admission, replace(wrong.policy, shadow=1.0))
    answer = shadowed.generate(prompt(), 8)
    assert (answer.record.status, answer.record.reason) == ("fallback", "shadow")
    assert answer.ids.tolist() == greedy(wrong.pair, prompt())
    assert answer.record.shadow["kl"] > 1e-3
    exact = served(itself, tmp_path, replace(ANY, shadow=1.0)).generate(prompt(), 8)
    assert exact.record.shadow["agrees"]
    assert exact.record.shadow["kl"] == pytest.approx(0, abs=1e-5)
    # Whether a request is one of them depends on its id alone, and a tenth of them are about a tenth.
    some = Handoff(wrong.pair, wrong._map, plan(), wrong.admission, replace(wrong.policy, shadow=0.1))
    drawn = [some._shadowed(f"request {n}") for n in range(2000)]
    assert drawn == [some._shadowed(f"request {n}") for n in range(2000)]
    assert 150 < sum(drawn) < 250


def test_fallback_while_the_breaker_is_open(wrong: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    handoff = Handoff(
        wrong.pair, wrong._map, plan(), wrong.admission, replace(wrong.policy, failures=2, retry_after=60.0)
    )
    now = [0.0]
    handoff.breaker = Breaker(2, 60.0, clock=lambda: now[0])
    cache = given(handoff)

    def reasons(count: int) -> list[str | None]:
        return [handoff.transfer(cache, prompt()).record.reason for _ in range(count)]

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "handed", lambda *args: 1 / 0)
        assert reasons(4) == ["error", "error", "breaker_open", "breaker_open"]
        now[0] = 61
        assert reasons(2) == ["error", "breaker_open"], "one trial, which fails"
    assert reasons(1) == ["breaker_open"]
    now[0] = 122
    assert reasons(3) == [None, None, None], "a trial that goes well closes it"


def test_one_trial_at_a_time() -> None:
    now = [0.0]
    breaker = Breaker(1, 10.0, clock=lambda: now[0])
    assert breaker.passes()
    breaker.failed()
    now[0] = 11
    assert [breaker.passes() for _ in range(3)] == [True, False, False]
    breaker.left()
    assert [breaker.passes() for _ in range(2)] == [True, False], "a trial that was none leaves the place to another"
    breaker.succeeded()
    assert breaker.passes()


def test_handoffs_side_by_side_leak_nothing(wrong: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the requests fail in the middle of their transfer: every answer is that of its own kind."""
    prompts = [prompt(16 + n)[:, n % 3 :] for n in range(12)]
    mapped = [wrong.generate(each, 6).ids.tolist() for each in prompts]
    exact = [greedy(wrong.pair, each, 6) for each in prompts]
    assert all(a != b for a, b in zip(mapped, exact, strict=True))
    inner, failing = Transfer.handed, threading.local()

    def sometimes(self: Transfer, *given: Any) -> KV:
        found = inner(self, *given)
        if failing.now:
            raise RuntimeError("on its way")
        return found

    monkeypatch.setattr(Transfer, "handed", sometimes)

    def ask(n: int) -> tuple[int, Answer]:
        failing.now = n % 2 == 0
        return n, wrong.generate(prompts[n % 12], 6, request=str(n))

    with ThreadPoolExecutor(4) as pool:
        for n, answer in pool.map(ask, range(48)):
            failed = n % 2 == 0
            assert answer.record.status == ("fallback" if failed else "applied")
            assert answer.record.request == str(n)
            assert answer.ids.tolist() == (exact if failed else mapped)[n % 12]


def test_every_handoff_leaves_a_line_and_counts(
    wrong: Handoff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry, log = prometheus.CollectorRegistry(), tmp_path / "handoffs.jsonl"
    accounts = serving.Accounts(log, registry)
    handoff = Handoff(wrong.pair, wrong._map, plan(), wrong.admission, wrong.policy, accounts)
    records = [handoff.generate(prompt(tokens), 2, request=f"r{tokens}").record for tokens in (24, 5)]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines == [json.loads(each.line()) for each in records]
    assert [(line["request"], line["status"], line["reason"]) for line in lines] == [
        ("r24", "applied", None),
        ("r5", "fallback", "too_short"),
    ]
    assert lines[0]["map"] == handoff._map.hash
    assert lines[0]["bytes"] == 2 * 23 * handoff._map.width * 4 * handoff.pair.target.geometry.layers
    count = registry.get_sample_value
    assert count("kvxfer_handoffs_total", {"status": "applied", "reason": ""}) == 1
    assert count("kvxfer_handoffs_total", {"status": "fallback", "reason": "too_short"}) == 1
    assert count("kvxfer_tokens_total", {"kind": "mapped"}) == 19
    assert count("kvxfer_tokens_total", {"kind": "exact"}) == 10
    # A log that can't be written is said before anything is served; later it loses a line and no request.
    with pytest.raises(KvxferError, match="log"):
        Handoff(wrong.pair, wrong._map, plan(), wrong.admission, wrong.policy, serving.Accounts(tmp_path))
    log.unlink()
    log.mkdir()
    assert handoff.generate(prompt(), 2).record.status == "applied"


def test_an_answer_comes_piece_by_piece(itself: Pair, tmp_path: Path) -> None:
    handoff = served(itself, tmp_path)
    *pieces, last = handoff.stream(prompt(), 8)
    assert isinstance(last, Answer)
    assert "".join(pieces) == last.text == itself.tokenizer.decode(last.ids)
    assert len(pieces) > 1


def test_identity_map_under_every_plan_is_the_target(itself: Pair, tmp_path: Path) -> None:
    for exact_first, hold_back in ((4, 1), (5, 3), (9, 7)):
        own, folder = plan(exact_first, hold_back), tmp_path / f"{exact_first}"
        cache_map = saved(itself, folder, identity_map(itself))
        found = record(cache_map, exact_first=exact_first)
        found["provenance"]["plan"]["hold_back"] = hold_back
        keep(folder, found)
        names = {"source": itself.source.name, "target": itself.target.name}
        handoff = Handoff.from_pretrained(folder, **names, policy=ANY, plan=own, device="cpu")
        answer = handoff.generate(prompt(), 8)
        assert (answer.record.status, answer.record.exact) == ("applied", exact_first + hold_back)
        assert answer.ids.tolist() == greedy(itself, prompt())
