"""The recipe: the same steps give the same weights, and what is saved is what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvxfer.toy.recipe import FIRST, TRAINED, Bucket, Recipe, Stage, build_model, draw_batch, save, stack, train
from kvxfer.toy.world import KINDS, VOCABULARY

TINY = Recipe(
    seed=5,
    width=16,
    feed_forward=32,
    heads=2,
    rope_theta=10_000.0,
    stages=(
        Stage(layers=1, steps=3, short_steps=2, answers_owner=True),
        Stage(layers=2, steps=3, short_steps=2, hop_layer=1),
    ),
    first=Bucket(64, 4, 4),
    short=(Bucket(64, 4, 8),),
    mixed=(Bucket(64, 4), Bucket(160, 2)),
)


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Training sets torch up for itself: undo it, so that other tests run as they would alone."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_same_recipe_same_weights() -> None:
    reports: list[tuple[int, str]] = []
    first, second = (train(TINY, lambda *told: reports.append(told)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [step for step, _ in reports] == [*range(1, 7), *range(1, 7)]
    assert reports[0] == reports[6]


def test_a_step_s_batch_depends_on_seed_and_step_alone() -> None:
    one, again = (draw_batch(2, 3, [FIRST], repeats=True) for _ in range(2))
    assert torch.equal(one.ids, again.ids)
    assert torch.equal(one.weights, again.weights)
    assert not torch.equal(one.ids, draw_batch(2, 4, [FIRST], repeats=True).ids)
    assert not torch.equal(one.ids, draw_batch(1, 3, [FIRST], repeats=True).ids)


def test_answers_weigh_most() -> None:
    batch = draw_batch(2, 0, [FIRST], repeats=False)
    answers = batch.kinds >= 0
    assert batch.weights[answers].min() > 10 * batch.weights[~answers].max()
    assert batch.kinds.max() == KINDS.index("two_hop")


def test_owners_stand_at_two_hop_prompts() -> None:
    batch = draw_batch(2, 0, [FIRST], repeats=False)
    before_answer = batch.kinds[:, 1:] == KINDS.index("two_hop")
    assert torch.equal(batch.owners[:, :-1] >= 0, before_answer)
    for row, place in before_answer.nonzero().tolist():
        words = [VOCABULARY[i] for i in batch.ids[row].tolist()]
        owner = VOCABULARY[batch.owners[row, place]]
        answer = words[place + 1]
        text = " ".join(words)
        assert f" who {words[place]} {owner} ." in text
        assert f" where {owner} {answer} ." in text


def test_repeated_words_come_in_half_of_the_first_batches() -> None:
    batch = draw_batch(2, 0, [FIRST], repeats=True)
    again = batch.kinds == TRAINED.index("repeat")
    assert again.any(1).float().mean() == 0.5
    for ids, known in zip(batch.ids[again.any(1)], again[again.any(1)], strict=True):
        period = int(known.nonzero()[0]) - 2
        assert torch.equal(ids[period + 2 :], ids[2 : len(ids) - period])


def test_stacking_repeats_the_layers_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    lower = build_model(TINY, 2)
    deeper = stack(lower, TINY, 5)
    for index, layer in enumerate(deeper.model.layers):
        below = lower.model.layers[index % 2].state_dict()
        assert all(torch.equal(value, below[name]) for name, value in layer.state_dict().items())
    assert torch.equal(deeper.lm_head.weight, lower.model.embed_tokens.weight)
    assert torch.equal(deeper.model.norm.weight, lower.model.norm.weight)


def test_saved_model_loads_in_single_precision(tmp_path: Path) -> None:
    model = train(TINY, lambda *_: None)
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.dtype == torch.float32
    halves = {name: value.half().float() for name, value in model.state_dict().items()}
    assert all(torch.equal(halves[name], value) for name, value in loaded.state_dict().items())
