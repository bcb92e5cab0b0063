"""Perplexity at several lengths: against plain loops, the same tokens at every length, and lengths that give way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Subject
from kvxfer.evals.perplexity import Perplexity, change, compared, same_ends
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.report.kinds import REPORTS
from kvxfer.report.perplexity import FIGURE, length_sentence
from kvxfer.text.spec import CorpusSpec
from kvxfer.toy.tokenizer import build_tokenizer
from kvxfer.toy.world import DOT, FILLER
from tests.small_corpora import text_spec

pytestmark = pytest.mark.draws

TOY = CorpusSpec("toy", "toy", 64)
PLAN = Plan("sinks", exact_first=3, hold_back=2)
SCORED = 8


@pytest.fixture(scope="module")
def subject(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A random map that says it was calibrated on 60 tokens."""
    width, draw = tiny_pair.target.geometry.kv_width, torch.Generator().manual_seed(1)
    blocks = DESIGNS["previous"].blocks("keys", [0, 1])
    layers = {
        (layer, kind): LinearLayer(
            blocks, torch.randn(1, len(blocks) * width, width, generator=draw) / 16, torch.randn(width, generator=draw)
        )
        for layer in range(tiny_pair.target.geometry.layers)
        for kind in KINDS
    }
    cache_map = CacheMap(layers, {"calibrated_on": {"name": "toy", "length": 60}})
    folder = tmp_path_factory.mktemp("map")
    return Subject(tiny_pair, cache_map, Mapper(cache_map), folder, PLAN, TOY, ())


@pytest.fixture(scope="module")
def data(subject: Subject) -> dict[str, Any]:
    return Perplexity("perplexity", scored=SCORED, rows=3, batch_tokens=200).measure(subject)


def nats(logits: Tensor, answer: tuple[int, ...]) -> float:
    """Minus the log-likelihoods of an answer whose tokens the last logits but one foretell."""
    return float(-sum(torch.log_softmax(row.double(), -1)[token] for row, token in zip(logits, answer, strict=True)))


def one_by_one(model: LoadedModel, past: KV, tail: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """The same, feeding a cache token by token."""
    rows = []
    for token in (*tail, *answer[:-1]):
        rows.append(model.logits(torch.tensor([[token]]), past)[0, -1])
        past = model.prefill(torch.tensor([[token]]), past)
    return nats(torch.stack(rows[len(tail) - 1 :]), answer)


def test_every_condition_equals_a_plain_loop(subject, data):
    pair = subject.pair
    ends = same_ends(TOY, pair.tokenizer, 3, (30, 60, 480), SCORED)
    assert [point["prefix"] for point in data["points"]] == list(ends)
    for point in data["points"][1:]:
        item, record = ends[point["prefix"]][1], point["items"][1]
        text = torch.tensor([[*item.prompt, *item.answer]])
        for name, model in (("ceiling", pair.target), ("source", pair.source)):
            expected = nats(model.logits(text)[0, -SCORED - 1 : -1], item.answer)
            assert record["nats"][name] == pytest.approx(expected, rel=1e-4)
        head, tail = torch.tensor([item.prompt[:-2]]), item.prompt[-2:]
        mapped = pair.rotated("target", subject.mapper.map(pair.content("source", pair.source.prefill(head))))
        cache = KV.join([pair.target.prefill(head[:, :3]), mapped.span(3, mapped.tokens)])
        assert record["nats"]["mapped"] == pytest.approx(one_by_one(pair.target, cache, tail, item.answer), rel=1e-4)
        zeros = KV.join([cache.span(0, 3), cache.zeros().span(3, cache.tokens)])
        zeroed = one_by_one(pair.target, zeros, tail, item.answer)
        assert record["nats"]["floor"] == pytest.approx(zeroed, rel=1e-4)
        bare = torch.tensor([[item.prompt[0], *tail, *item.answer]])
        expected = nats(pair.target.logits(bare)[0, -SCORED - 1 : -1], item.answer)
        assert record["nats"]["no_context"] == pytest.approx(expected, rel=1e-4)
        total = sum(each["nats"]["mapped"] for each in point["items"])
        assert point["conditions"]["mapped"]["perplexity"] == pytest.approx(np.exp(total / (3 * SCORED)))


def test_one_row_a_batch_or_all_give_the_same(subject, data):
    again = Perplexity("perplexity", prefixes=(30, 60), scored=SCORED, rows=3, batch_tokens=1).measure(subject)
    for point, there in zip(again["points"], data["points"], strict=False):
        for one, other in zip(point["items"], there["items"], strict=True):
            assert one["document"] == other["document"]
            assert one["nats"] == pytest.approx(other["nats"], rel=1e-5)


def test_a_longer_toy_prefix_tells_the_same_facts_between_more_filler():
    tokenizer = build_tokenizer()
    for kind in ("toy", "toy_shuffled"):
        ends = same_ends(replace(TOY, kind=kind), tokenizer, 4, (64, 300), 16)
        filler = set(tokenizer.convert_tokens_to_ids([*FILLER, DOT]))
        for short, long in zip(*ends.values(), strict=True):
            assert (len(short.prompt), len(long.prompt)) == (64, 300)
            assert (short.answer, short.document) == (long.answer, long.document)
            told = [[token for token in item.prompt if token not in filler] for item in (short, long)]
            assert told[0] == told[1]
        again = same_ends(replace(TOY, kind=kind), tokenizer, 4, (64, 300), 16)
        assert again == ends


def test_a_shorter_prefix_of_text_is_the_end_of_a_longer_one(tmp_path, tiny_pair):
    for n in range(60):
        (tmp_path / f"{n}.txt").write_text(f"anna has the key {n} . " * 20)
    ends = same_ends(text_spec(tmp_path), tiny_pair.tokenizer, 5, (10, 40), 6)
    for short, long in zip(*ends.values(), strict=True):
        assert long.prompt[-10:] == short.prompt
        assert long.answer == short.answer


def test_what_a_length_changes_is_a_paired_t_test():
    draw = np.random.default_rng(2)

    def items(shift: float) -> list[dict[str, Any]]:
        noise = draw.normal(0, 0.1, 12)
        levels = {"ceiling": 4 + noise, "source": 6 + noise, "mapped": 4.5 + shift + noise + draw.normal(0, 0.1, 12)}
        return [
            {"document": f"d{n}", "tokens": 2, "nats": {name: float(row[n]) for name, row in levels.items()}}
            for n in range(12)
        ]

    before, after = items(0.0), items(1.0)
    found = change(before, after)
    loss = [[item["nats"]["mapped"] - item["nats"]["ceiling"] for item in each] for each in (after, before)]
    assert found["loss"]["p"] == pytest.approx(stats.ttest_rel(*loss).pvalue)
    assert found["loss"]["difference"] == pytest.approx((np.mean(loss[0]) - np.mean(loss[1])) / 2)
    assert found["gap_recovered"]["difference"] == pytest.approx((np.mean(loss[1]) - np.mean(loss[0])) / 2, abs=0.02)
    conditions = [
        {c: {"nats": float(np.mean([i["nats"][c] for i in each]) / 2)} for c in each[0]["nats"]}
        for each in (before, after)
    ]
    points = [
        {"domain": "toy", "prefix": prefix, "items": each, "conditions": row}
        for prefix, each, row in zip((64, 512), (before, after), conditions, strict=True)
    ]
    told = length_sentence(compared(points, 64), {point["prefix"]: point for point in points})
    assert told.startswith("From the calibrated 64 tokens to 512, what it loses against the ceiling grows (+0.5")
    assert "the gap recovered goes from 7" in told


def test_the_report_says_what_was_left_out_and_reads_well(subject, data, tmp_path):
    said = REPORTS["perplexity"].verdict(data).sentence
    # Models without training: neither the source nor the target knows the text.
    assert said.startswith("Cannot tell: this pair cannot show a transfer's worth, since its source is not shown")
    assert "The mapped cache of 480 tokens of toy against the source: " in said
    lines = REPORTS["perplexity"].sections(json.loads(json.dumps(data)))
    assert "calibrated on rows of 60 tokens" in lines
    REPORTS["perplexity"].figures(data, tmp_path)
    assert (tmp_path / FIGURE).stat().st_size > 10_000
    assert all(np.isfinite(value) for value in REPORTS["perplexity"].metrics(data).values())


def test_automatic_lengths_give_way_and_named_ones_are_refused(subject, tmp_path):
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"anna has the key {n} . " * 12)
    short = replace(subject, corpus=replace(text_spec(tmp_path), name="short"))
    found = Perplexity("perplexity", scored=4, rows=4).measure(short)
    assert [point["prefix"] for point in found["points"]] == [30, 60]
    assert found["notes"][0].startswith("No prefix of 480 tokens of short: short has only ")
    with pytest.raises(KvxferError, match=r"eval\.rows=4: short has only \d rows of 484 tokens"):
        Perplexity("perplexity", prefixes=(480,), scored=4, rows=4).measure(short)
    far = Perplexity("perplexity", prefixes=(5000,), rows=4)
    with pytest.raises(KvxferError, match=r"eval\.prefixes: 5064 tokens"):
        far.measure(subject)
    with pytest.raises(KvxferError, match=r"eval\.prefixes=\[8, 9\] and eval\.scored=4 ask for corpus\.length=12: "):
        Perplexity("perplexity", prefixes=(8, 9), scored=4, rows=4).measure(subject)
    unknown = replace(subject, cache_map=CacheMap(subject.cache_map.layers, {}))
    with pytest.raises(KvxferError, match=r"eval\.prefixes is empty, and nothing beside the map says"):
        Perplexity("perplexity").measure(unknown)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefixes": (1,)}, r"eval\.prefixes=\[1\] must all be 2"),
        ({"prefixes": (8, 8)}, "names a length twice"),
        ({"rows": 1}, r"eval\.rows=1 must be 2"),
        ({"batch_tokens": 0}, r"eval\.batch_tokens=0 must be 1"),
    ],
)
def test_a_wrong_setting_is_named(given, message):
    with pytest.raises(KvxferError, match=message):
        Perplexity("perplexity", **given)
