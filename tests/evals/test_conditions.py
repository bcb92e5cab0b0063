"""What the target is handed under each condition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import (
    HANDED,
    MAPPED,
    OWN,
    Controls,
    given_conditions,
    mapped_conditions,
    own_conditions,
    prefix_conditions,
    relative_depth,
)
from kvxfer.evals.items import Item, batches, donors_of
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.random_maps import random_map

PROMPT, CONTEXT = 20, 17
PLAN = Plan("sinks", exact_first=4, hold_back=2)
DONORS = [1, 2, 0]


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(5, 100, (3, PROMPT), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mapper(tiny_pair: Pair) -> Mapper:
    """A random map: what it does is of no matter here."""
    width, draw = tiny_pair.target.geometry.kv_width, torch.Generator().manual_seed(1)
    layers = {}
    for layer in range(tiny_pair.target.geometry.layers):
        for kind in KINDS:
            blocks = DESIGNS["previous"].blocks(kind, [0, 1])
            weight = torch.randn(1, len(blocks) * width, width, generator=draw) / 16
            layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(width, generator=draw))
    return Mapper(CacheMap(layers, {}))


@pytest.fixture(scope="module")
def random(tiny_pair: Pair) -> Mapper:
    """Another one."""
    return Mapper(random_map(tiny_pair, DESIGNS["same"], seed=2))


@pytest.fixture(scope="module")
def prepared(tiny_pair, mapper, random, prompt):
    given = given_conditions(tiny_pair, PLAN, prompt)
    transfer = Transfer(tiny_pair, mapper, PLAN)
    controls = Controls(prompt[DONORS], Transfer(tiny_pair, random, PLAN))
    return {**given, **mapped_conditions(transfer, prompt, controls)}


def same(a: KV, b: KV, atol: float = 0.0) -> bool:
    pairs = zip([*a.keys, *a.values], [*b.keys, *b.values], strict=True)
    return all(torch.allclose(x, y, rtol=0, atol=atol) for x, y in pairs)


def test_every_condition_is_there_and_reads_the_same_prompt(tiny_pair, prepared, prompt):
    assert set(prepared) == set(HANDED)
    for one in prepared.values():
        assert one.model is tiny_pair.target
        assert one.past.tokens == PROMPT - PLAN.hold_back
        assert torch.equal(one.tail, prompt[:, -PLAN.hold_back :])
    own = own_conditions(tiny_pair, prompt, CONTEXT)
    assert tuple(own) == OWN
    assert all(one.past is None for one in own.values())
    assert own["ceiling"].model is own["no_context"].model is tiny_pair.target
    assert own["source"].model is tiny_pair.source
    assert torch.equal(own["ceiling"].tail, prompt)
    assert torch.equal(own["source"].tail, prompt)


def test_without_context_the_question_and_the_first_token_remain(tiny_pair, prompt):
    bare = own_conditions(tiny_pair, prompt, CONTEXT)["no_context"].tail
    assert torch.equal(bare, torch.cat([prompt[:, :1], prompt[:, CONTEXT:]], dim=1))
    only = own_conditions(tiny_pair, prompt, PROMPT)["no_context"].tail
    assert torch.equal(only, prompt[:, -1:])


def test_identity_scores_as_the_ceiling_does(tiny_pair, prepared, prompt):
    answers = torch.tensor([[7, 8, 9]] * 3)
    ceiling = own_conditions(tiny_pair, prompt, CONTEXT)["ceiling"]
    wanted = token_log_likelihoods(ceiling, answers)
    assert torch.allclose(token_log_likelihoods(prepared["identity"], answers), wanted, atol=1e-4, rtol=0)
    others = [name for name in HANDED if name != "identity"]
    assert all((token_log_likelihoods(prepared[name], answers) - wanted).abs().max() > 1e-3 for name in others)


def test_the_floor_is_a_zeroed_cache_with_the_plan_s_exact_tokens(tiny_pair, prepared, prompt):
    floor, stop = prepared["floor"].past, PROMPT - PLAN.hold_back
    rest = floor.span(4, stop)
    assert floor.tokens == stop
    assert all(not tensor.any() for tensor in (*rest.keys, *rest.values))
    assert same(floor.span(0, 4), tiny_pair.target.prefill(prompt[:, :stop]).span(0, 4), atol=1e-5)
    whole = given_conditions(tiny_pair, Plan("all", exact_first=0, hold_back=2), prompt)["floor"].past
    assert all(not tensor.any() for tensor in (*whole.keys, *whole.values))


def test_after_a_prefix_every_condition_begins_with_the_plan_s_exact_tokens(tiny_pair, mapper, prepared, prompt):
    found = prefix_conditions(Transfer(tiny_pair, mapper, PLAN), prompt)
    assert set(found) == {"ceiling", "source", "no_context", "floor", "raw_copy", "mapped"}
    for name in ("floor", "raw_copy", "mapped"):
        assert same(found[name].past, prepared[name].past, atol=1e-5)
        assert torch.equal(found[name].tail, prompt[:, -PLAN.hold_back :])
    assert found["no_context"].past is None
    assert torch.equal(found["no_context"].tail, torch.cat([prompt[:, :1], prompt[:, -PLAN.hold_back :]], dim=1))


def test_the_plan_says_which_tokens_are_exact(tiny_pair, mapper, random, prepared, prompt):
    stop = PROMPT - PLAN.hold_back
    exact = tiny_pair.target.prefill(prompt[:, :stop])
    content = tiny_pair.content("source", tiny_pair.source.prefill(prompt[:, :stop]))
    mapped = tiny_pair.rotated("target", mapper.map(content))
    assert same(prepared["mapped_all"].past, mapped, 1e-5)
    for name in ("mapped", "floor", "raw_copy", "wrong_donor", "random_map"):
        assert same(prepared[name].past.span(0, 4), exact.span(0, 4), atol=1e-5)
    assert same(prepared["mapped"].past.span(4, stop), mapped.span(4, stop), 1e-5)
    assert same(prepared["wrong_donor"].past.span(4, stop), mapped.rows(torch.tensor(DONORS)).span(4, stop), 1e-5)
    assert not same(mapped.span(4, stop), exact.span(4, stop), atol=0.1)
    assert same(
        prepared["random_map"].past.span(4, stop), tiny_pair.rotated("target", random.map(content)).span(4, stop), 1e-5
    )


def test_controls_come_only_where_they_are_asked_for(tiny_pair, mapper, prepared, prompt):
    alone = mapped_conditions(Transfer(tiny_pair, mapper, PLAN), prompt)
    assert set(alone) == {"mapped"} < set(MAPPED) < set(prepared)
    assert same(alone["mapped"].past, prepared["mapped"].past)


def test_a_map_does_not_look_ahead(tiny_pair, mapper, prompt):
    """Mapping a prefix gives the beginning of mapping the whole."""
    content = tiny_pair.content("source", tiny_pair.source.prefill(prompt))
    assert same(mapper.map(content).span(0, 9), mapper.map(content.span(0, 9)), atol=1e-5)


def test_a_raw_copy_is_the_content_at_the_relative_depth(tiny_pair, prepared, prompt):
    stop = PROMPT - PLAN.hold_back
    content = tiny_pair.content("source", tiny_pair.source.prefill(prompt[:, :stop]))
    copied = tiny_pair.content("target", prepared["raw_copy"].past)
    assert tiny_pair.source.geometry.layers, tiny_pair.target.geometry.layers == (2, 3)
    for layer, origin in ((0, 0), (2, 1)):
        for kind in KINDS:
            got, wanted = getattr(copied, kind)[layer][:, :, 4:], getattr(content, kind)[origin][:, :, 4:]
            assert torch.allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "target", "origins"),
    [
        (3, 6, [0, 0, 1, 1, 2, 2]),
        (6, 3, [0, 2, 5]),
        (4, 4, [0, 1, 2, 3]),
        (1, 3, [0, 0, 0]),
        (3, 1, [0]),
    ],
)
def test_relative_depth_goes_from_the_first_layer_to_the_last(source, target, origins):
    layers = [torch.full((1, 1, 1, 1), float(n)) for n in range(source)]
    copied = relative_depth(KV(layers, layers), target)
    assert [int(keys) for keys in copied.keys] == [int(values) for values in copied.values] == origins


def questions_about(stories: int, questions: int) -> list[Item]:
    return [
        Item(f"{s}/{q}", f"story {s}", "where", (1, s, q), 2, (q,)) for s in range(stories) for q in range(questions)
    ]


@pytest.mark.parametrize("stories", [2, 3, 7])
@pytest.mark.parametrize("questions", [1, 2, 5])
@pytest.mark.parametrize("size", [2, 3, 25])
def test_every_item_has_a_donor_of_another_document(stories, questions, size):
    items = questions_about(stories, questions)
    # one story is asked far more often than the others, and one has an answer of its own length
    items += [replace(item, id=f"more {item.id}") for item in items if item.document == "story 0"]
    items[-1] = replace(items[-1], answer=(1, 2))
    parts = list(batches(items, size))
    assert sorted(item.id for part in parts for item in part.items) == sorted(item.id for item in items)
    prompts = {item.prompt: item.document for item in items}
    for part in parts:
        assert part.prompt.shape == part.donors.shape
        for item, donor in zip(part.items, part.donors.tolist(), strict=True):
            assert prompts[tuple(donor)] != item.document


def test_a_text_row_s_donor_is_far_from_it():
    rows = [Item(str(n), f"document {n}", "text", (n, n), 2, (0,)) for n in range(8)]
    assert [int(donor.id) for donor in donors_of(rows)] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_batches_are_as_large_as_asked_and_of_one_shape():
    items = questions_about(10, 5) + [replace(item, id=f"+{item.id}", answer=(1, 2)) for item in questions_about(4, 1)]
    parts = list(batches(items, 20))
    assert [len(part.items) for part in parts] == [20, 20, 10, 4]
    assert all(len({len(item.answer) for item in part.items}) == 1 for part in parts)


def test_a_single_document_is_refused_where_a_donor_is_needed():
    with pytest.raises(KvxferError, match=r"about story 0.* raise eval\.stories"):
        list(batches(questions_about(1, 5), 2))
