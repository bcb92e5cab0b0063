"""Without a map the harness gets from us what it gets from its own model, request by request; with a bad one not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks import requests as harness
from kvxfer.evals.benchmarks.model import HarnessModel, decoding_of
from kvxfer.evals.benchmarks.requests import Decoding, Handover, before_stop, cut
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.handoff.transfer import Transfer
from kvxfer.toy.world import VOCABULARY
from tests.harness_pairs import PLAN, model_of, own_model, scaled_map, scoring, with_itself, writing

EXACT = 2e-5
WORDS = VOCABULARY[5:]


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


STORY = words(20, 0)
CHOICES = [(STORY, " kitchen"), (STORY, " garden"), (STORY, " hot tea"), (STORY, " hot soup"), (STORY, " hot tea .")]
REQUESTS = scoring(
    [
        *CHOICES,
        (words(20, 1), " attic"),
        (words(33, 2), f" {words(6, 3)}"),
        (f"<s> {words(9, 4)}  ", "cellar ."),  # begins with BOS, and its spaces belong to the continuation
        ("anna", " kitchen"),  # one token: nothing to hand over
        ("anna", " hot tea"),
        ("anna ben", " kitchen"),  # two: the plan's exact tokens cover what is handed over
        ("", "where is the key"),
        ("", "<s> where key"),  # its BOS is the context
    ]
)
CONTEXTS = [words(20, 5), words(20, 6), words(31, 7), "anna", "<s> where key"]


def answers(model, requests=REQUESTS) -> list[tuple[float, bool]]:
    return [tuple(each) for each in model.loglikelihood(requests, disable_tqdm=True)]


def difference(found, expected) -> float:
    assert len(found) == len(expected)
    return max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return answers(own_model(tiny_pair))


@pytest.mark.parametrize(("condition", "batch_size"), [("ceiling", 3), ("identity", 1), ("mapped", 3), ("source", 1)])
def test_a_map_that_changes_nothing_scores_as_the_harness_itself(tiny_pair, expected, condition, batch_size):
    found = answers(model_of(tiny_pair, condition, batch_size=batch_size))
    assert difference(found, expected) < EXACT
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_greedy_is_told_of_continuations_that_would_be_decoded(tiny_pair):
    [text] = own_model(tiny_pair).generate_until(writing([STORY], max_gen_toks=3), disable_tqdm=True)
    requests = scoring([(STORY, f" {text}"), (STORY, f" {text.split()[0]} anna ben")])
    for model in (own_model(tiny_pair), model_of(tiny_pair)):
        assert [greedy for _, greedy in answers(model, requests)] == [True, False]


@pytest.mark.parametrize(("condition", "factor"), [("floor", 1.0), ("mapped", 0.0), ("mapped", 0.9)])
def test_a_zeroed_or_wrong_map_scores_otherwise_where_something_is_handed_over(tiny_pair, expected, condition, factor):
    found = answers(model_of(tiny_pair, condition, factor))
    moved = [abs(a[0] - b[0]) > 10 * EXACT for a, b in zip(found, expected, strict=True)]
    short = [len(model_of(tiny_pair).tok_encode(request.args[0])) for request in REQUESTS]
    # A handed cache of one or two tokens is the target's own work under the plan.
    assert moved == [length >= PLAN.exact_first + 2 for length in short]


def test_shifted_positions_are_caught(tiny_pair, expected, monkeypatch):
    itself, real = with_itself(tiny_pair), Transfer._angles

    def shifted(transfer, which, turn, start, places):
        return real(transfer, which, turn, start + (3 if which == "target" else 0), places)

    monkeypatch.setattr(Transfer, "_angles", shifted)
    found = answers(HarnessModel(Handover(itself, PLAN, "mapped", scaled_map(itself, 1.0)), 4))
    assert difference(found[:5], expected[:5]) > 10 * EXACT


def test_each_context_is_prepared_once(tiny_pair, monkeypatch):
    seen = []
    real = Handover.prepare

    def prepare(handover, contexts):
        seen.extend(map(tuple, contexts.tolist()))
        return real(handover, contexts)

    monkeypatch.setattr(Handover, "prepare", prepare)
    answers(model_of(tiny_pair))
    assert len(seen) == len(set(seen)) == len({request.args[0].strip() or "<s>" for request in REQUESTS})


@pytest.mark.parametrize("longest", [8, 24])
def test_what_is_too_long_is_cut_from_the_left_as_the_harness_does(tiny_pair, longest):
    requests = [request for request in REQUESTS if "  " not in request.args[0]]
    ours = model_of(tiny_pair)
    ours.max_length = longest
    assert difference(answers(ours, requests), answers(own_model(tiny_pair, max_length=longest), requests)) < EXACT


def test_cutting_keeps_every_scored_token_and_one_before():
    assert cut([1, 2, 3, 4], [5, 6], 10) == ((1, 2, 3, 4), (5, 6))
    assert cut([1, 2, 3, 4], [5, 6], 3) == ((3, 4), (5, 6))
    assert cut([1, 2], [5, 6, 7], 3) == ((2,), (5, 6, 7))
    for continuation in ([], [5, 6, 7, 8]):
        with pytest.raises(KvxferError, match=rf"eval\.tasks: an answer of {len(continuation)} tokens"):
            cut([1, 2], continuation, 3)


@pytest.mark.parametrize("longest", [None, 20])
def test_a_map_that_changes_nothing_writes_as_the_harness_itself(tiny_pair, longest):
    requests = writing(CONTEXTS, max_gen_toks=6)
    expected = own_model(tiny_pair, max_length=longest).generate_until(requests, disable_tqdm=True)
    assert all(len(text.split()) > 4 for text in expected)
    for condition in ("ceiling", "identity", "mapped", "floor"):
        ours = model_of(tiny_pair, condition)
        ours.max_length = longest or ours.max_length
        assert (ours.generate_until(requests) == expected) == (condition != "floor")


def test_stop_strings_end_an_answer_wherever_their_tokens_begin(tiny_pair):
    contexts = CONTEXTS[:3]
    whole = own_model(tiny_pair).generate_until(writing(contexts, max_gen_toks=8), disable_tqdm=True)
    a, b, c = whole[0].split()[:3]
    # Within a token, the end of one with the beginning of the next, and over three.
    for stop in (b[1:], f"{a[-1]} {b[:2]}", f"{a} {b} {c}"):
        options = {"until": ["never said", stop], "max_gen_toks": 8}
        requests = writing(contexts, **options)
        expected = own_model(tiny_pair).generate_until(requests, disable_tqdm=True)
        assert expected[0] == whole[0].split(stop)[0] != whole[0]
        assert model_of(tiny_pair).generate_until(requests) == expected


def test_special_tokens_end_an_answer_and_are_not_in_it(tiny_pair, monkeypatch):
    [text] = own_model(tiny_pair).generate_until(writing(CONTEXTS[:1], max_gen_toks=6), disable_tqdm=True)
    model = model_of(tiny_pair)
    first, second, *_ = text.split()
    assert first != second
    monkeypatch.setattr(type(tiny_pair.target), "end_tokens", frozenset(model.tok_encode(second)))
    assert model.generate_until(writing(CONTEXTS[:1], max_gen_toks=6)) == [f"{first} {second}"]


def test_no_token_is_computed_after_the_last_row_is_done(tiny_pair, monkeypatch):
    counted = []
    real = harness._choose

    def choose(*given):
        counted.append(1)
        return real(*given)

    monkeypatch.setattr(harness, "_choose", choose)
    model_of(tiny_pair).generate_until(writing(CONTEXTS[:1], until=[" "], max_gen_toks=50))
    assert len(counted) == 2  # the second word brings the space


def test_the_first_stop_string_in_the_text_counts():
    assert before_stop("a b c", ["c", "b"]) == "a "
    assert before_stop("a b c", []) == before_stop("a b c", ["d"]) == "a b c"


def test_sampling_depends_on_the_seed_and_not_on_the_batch(tiny_pair):
    requests = writing([*CONTEXTS[1:3], CONTEXTS[1]], max_gen_toks=5, do_sample=True, temperature=1.0)
    itself = with_itself(tiny_pair)

    def texts(seed: int, batch_size: int, condition: str = "ceiling") -> list[str]:
        handover = Handover(itself, PLAN, condition, scaled_map(itself, 1.0))
        return HarnessModel(handover, batch_size, seed).generate_until(requests)

    assert texts(0, 1) == texts(0, 3) == texts(0, 3, "mapped")
    assert texts(0, 1) != texts(1, 1)
    assert texts(0, 1)[0] != texts(0, 1)[-1]  # a repeat of a request is another draw


def test_tokens_are_drawn_with_the_models_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    dice = [random.Random(n) for n in range(4000)]

    def shares(**options) -> torch.Tensor:
        drawn = harness._choose(logits, Decoding(1, temperature=2.0, **options), dice)
        return torch.bincount(drawn, minlength=4) / 4000

    wanted = torch.tensor([1.0, 0.5, 0.0, -0.5]).softmax(0)
    assert torch.allclose(shares(), wanted, atol=0.03)
    kept = torch.tensor([wanted[0], wanted[1], 0, 0]) / (wanted[0] + wanted[1])
    assert torch.allclose(shares(top_k=2), kept, atol=0.03)
    assert torch.allclose(shares(top_p=float(wanted[0]) + 0.01), kept, atol=0.03)
    assert torch.equal(shares(top_p=0.01), torch.tensor([1.0, 0, 0, 0]))


def test_generation_settings_are_read_as_the_harness_reads_them():
    assert decoding_of({}) == Decoding(256)
    assert decoding_of({"until": "x", "max_new_tokens": 7}) == Decoding(7, ("x",))
    assert decoding_of({"until": ["x", ""], "do_sample": False, "temperature": 0.7, "num_beams": 1}).temperature == 0
    assert decoding_of({"temperature": 0.7}).temperature == 0.7
    assert decoding_of({"do_sample": True, "top_p": 0.9, "top_k": 5}) == Decoding(256, (), 1.0, 5, 0.9)
    with pytest.raises(KvxferError, match=r"eval\.tasks: a task decodes with num_beams=4"):
        decoding_of({"num_beams": 4})


def test_what_can_not_be_asked_is_refused(tiny_pair):
    model = model_of(tiny_pair)
    with pytest.raises(KvxferError, match=r"use eval=perplexity"):
        model.loglikelihood_rolling([])
    model.max_length = 10
    with pytest.raises(KvxferError, match=r"answers of 10 tokens \(max_gen_toks\)"):
        model.generate_until(writing(CONTEXTS, max_gen_toks=10))
    with pytest.raises(KvxferError, match=r"condition mapped needs a map"):
        Handover(tiny_pair, PLAN, "mapped")


def test_a_longer_hold_back_changes_nothing(tiny_pair, expected):
    itself = with_itself(tiny_pair)
    for hold_back in (3, 25):
        handover = Handover(itself, replace(PLAN, hold_back=hold_back), "mapped", scaled_map(itself, 1.0))
        assert difference(answers(HarnessModel(handover, 4)), expected) < EXACT


def test_scores_are_those_of_a_plain_pass(tiny_pair):
    """Independent of the harness: the sum over the tokens of one forward pass."""
    model = model_of(tiny_pair, "ceiling")
    ids = torch.tensor([model.tok_encode(f"{STORY} hot tea .")])
    prepared = Handover(tiny_pair, PLAN, "ceiling").prepare(ids[:, :-3])
    total = float(token_log_likelihoods(prepared, ids[:, -3:]).sum())
    assert answers(model)[4][0] == pytest.approx(total, abs=EXACT)
