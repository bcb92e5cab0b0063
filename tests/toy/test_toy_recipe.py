"""The recipe: the same steps give the same weights, and what is saved is what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvxfer.toy.recipe import RECIPES, TRAINED, Bucket, Recipe, Report, draw_batch, save, train
from kvxfer.toy.world import KINDS

TINY = Recipe(
    seed=5,
    layers=1,
    width=16,
    feed_forward=32,
    heads=2,
    rope_theta=10_000.0,
    steps=6,
    short_steps=4,
    first=Bucket(64, 4, 4),
    short=(Bucket(64, 4, 4),),
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
    reports: list[Report] = []
    first, second = (train(TINY, reports.append).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [report.step for report in reports] == [*range(1, 7), *range(1, 7)]
    assert reports[0] == reports[6]


def test_a_step_s_batch_depends_on_seed_and_step_alone() -> None:
    recipe = RECIPES["target"]
    one, again = (draw_batch(recipe, 3, looks_up=True) for _ in range(2))
    assert torch.equal(one.ids, again.ids)
    assert torch.equal(one.weights, again.weights)
    assert not torch.equal(one.ids, draw_batch(recipe, 4, looks_up=True).ids[: len(one.ids)])
    assert not torch.equal(one.ids, draw_batch(RECIPES["source"], 3, looks_up=True).ids[: len(one.ids)])


def test_answers_weigh_most() -> None:
    batch = draw_batch(RECIPES["target"], RECIPES["target"].steps - 1, looks_up=True)
    answers = batch.kinds >= 0
    assert batch.weights[answers].min() > 10 * batch.weights[~answers].max()
    assert batch.kinds.max() == KINDS.index("two_hop")


def test_repeated_words_come_until_look_up_has_formed() -> None:
    batch = draw_batch(RECIPES["target"], 0, looks_up=False)
    again = batch.kinds == TRAINED.index("repeat")
    assert again.any(1).float().mean() == 0.5
    for ids, known in zip(batch.ids[again.any(1)], again[again.any(1)], strict=True):
        period = int(known.nonzero()[0]) - 2
        assert torch.equal(ids[known], ids[1:][known[1:].nonzero().flatten() - period])


def test_saved_model_loads_in_single_precision(tmp_path: Path) -> None:
    model = train(TINY, lambda report: None)
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.dtype == torch.float32
    halves = {name: value.half().float() for name, value in model.state_dict().items()}
    assert all(torch.equal(halves[name], value) for name, value in loaded.state_dict().items())
