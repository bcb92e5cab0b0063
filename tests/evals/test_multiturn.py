"""Conversations that change models: drift is nothing where nothing is lost, and told with its tests where it is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.multiturn import Handed, Multiturn, Stage, play, summarise_pattern, toy_talks
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.evals.specs import DOWN, LARGE, PATTERNS, SMALL, UP
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair, load_pair
from kvxfer.models.spec import ModelSpec, PairSpec
from kvxfer.report.rendering import render
from kvxfer.toy.world import VOCABULARY
from tests.random_maps import direction, identity_map
from tests.small_runs import results_of, run, settings_of, toy_models

pytestmark = pytest.mark.draws

SMALL_RUN = ["eval=multiturn", "eval.turns=3", "eval.stories=4", "eval.batch_size=3"]


def stage(pair: Pair, up: Transfer, down: Transfer, max_hops: int | None = None) -> Stage:
    return Stage({SMALL: pair.source, LARGE: pair.target}, {UP: up, DOWN: down}, max_hops)


def played(on: Stage, pair: Pair) -> tuple[list[dict[str, Any]], dict[str, list[Handed]]]:
    talks = toy_talks(4, 4, 16, pair.tokenizer, 0)
    return play(on, talks, list(PATTERNS), 3, lambda n: None)


@pytest.fixture(scope="module")
def done(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("evaluate", tmp_path_factory.mktemp("outputs"), *toy_models(tiny_folders), *SMALL_RUN)


def test_nothing_drifts_where_the_map_loses_nothing(tiny_pair: Pair) -> None:
    same = replace(tiny_pair, source=tiny_pair.target)
    exact = Transfer(same, Mapper(identity_map(same)), Plan("all", 0))
    records, handed = played(stage(same, exact, exact), same)
    assert [given.hops for given in handed["ping_pong"]] == [0, 1, 2, 3]
    for record in records:
        for pattern in PATTERNS:
            assert record["nats"][pattern] == pytest.approx(record["nats"][LARGE], abs=1e-3)
            assert record["correct"][pattern] == record["correct"][LARGE]


def test_nothing_drifts_where_nothing_is_mapped(tiny_pair: Pair) -> None:
    lost = [direction(pair, DESIGNS["same"], 4) for pair in (tiny_pair, tiny_pair.reversed())]
    records, handed = played(stage(tiny_pair, *lost, max_hops=0), tiny_pair)
    answering = {"up": [LARGE] * 4, "down": [SMALL] * 4, "ping_pong": [SMALL, LARGE] * 2}
    for pattern, names in answering.items():
        assert [given.answering for given in handed[pattern]] == names
        assert all(given.mapped == given.hops == 0 for given in handed[pattern])
    for record in records:
        for pattern, names in answering.items():
            ceiling = record["nats"][names[record["turn"] - 1]]
            assert record["nats"][pattern] == pytest.approx(ceiling, abs=1e-3)
    drifted, _ = played(stage(tiny_pair, *lost), tiny_pair)
    assert all(abs(record["nats"]["up"] - record["nats"][LARGE]) > 1e-3 for record in drifted)


def test_what_costs_no_map_is_what_a_plain_loop_is_handed(tiny_pair: Pair) -> None:
    """At the last turn, of the whole conversation so far but its held-back token."""
    up, down = (direction(pair, DESIGNS["same"], 4) for pair in (tiny_pair, tiny_pair.reversed()))
    talks = toy_talks(2, 3, 16, tiny_pair.tokenizer, 0)
    records, handed = play(stage(tiny_pair, up, down), talks, list(PATTERNS), 2, lambda n: None)
    for record, talk in zip((r for r in records if r["turn"] == 3), talks, strict=True):
        said = [token for turn in talk[:-1] for token in (*turn.text, *turn.reply)] + list(talk[-1].text)
        answer = torch.tensor([talk[-1].item.answer])
        for name, transfer in ((LARGE, up), (SMALL, down)):
            model, head = transfer.pair.target, torch.tensor([said[:-1]])
            own, read = model.prefill(head), transfer.pair.source.prefill(head)
            index = [round(n * (read.layers - 1) / (own.layers - 1)) for n in range(own.layers)]
            content = transfer.pair.content("source", read)
            copied = KV([content.keys[n] for n in index], [content.values[n] for n in index])
            for control, cache in (("floor", own.zeros()), ("raw_copy", transfer.pair.rotated("target", copied))):
                past = KV.join([own.span(0, 4), cache.span(4, own.tokens)])
                scored = token_log_likelihoods(Prepared(model, past, torch.tensor([said[-1:]])), answer)
                assert record["nats"][f"{name} {control}"] == pytest.approx(-float(scored.sum()), rel=1e-4)
            bare = torch.tensor([[said[0], *talk[-1].text]])
            scored = token_log_likelihoods(Prepared(model, None, bare), answer)
            assert record["nats"][f"{name} no_context"] == pytest.approx(-float(scored.sum()), rel=1e-4)
    found = summarise_pattern(records, "ping_pong", handed["ping_pong"])["pooled"]["conditions"]
    answering = {turn: given.answering for turn, given in enumerate(handed["ping_pong"], 1)}
    total = sum(record["nats"][f"{answering[record['turn']]} floor"] for record in records)
    assert found["floor"]["nats"] == pytest.approx(total / sum(record["tokens"] for record in records))
    assert "ancestor_copy" not in found


def test_only_the_model_that_was_pruned_from_has_ancestors(tiny_folders: tuple[Path, Path]) -> None:
    """The whole model is handed copies of the layers that the other kept; the other has no ancestors."""
    whole = ModelSpec(str(tiny_folders[1]))
    pair = load_pair(PairSpec("pruned", replace(whole, drop_layers=(1,)), whole, dtype="float32", device="cpu"))
    on = stage(pair, *(direction(each, DESIGNS["same"], 4) for each in (pair, pair.reversed())))
    records, handed = played(on, pair)
    found = {pattern: summarise_pattern(records, pattern, handed[pattern])["pooled"] for pattern in PATTERNS}
    copied = [pattern for pattern, each in found.items() if "ancestor_copy" in each["conditions"]]
    assert (
        copied == [pattern for pattern, each in found.items() if "mapped_vs_ancestor_copy" in each["tests"]] == ["up"]
    )


def test_only_what_the_answering_model_did_not_read_is_mapped(tiny_pair: Pair) -> None:
    maps = [direction(pair, DESIGNS["previous"], 4) for pair in (tiny_pair, tiny_pair.reversed())]
    _, handed = played(stage(tiny_pair, *maps), tiny_pair)
    # A turn is 16 words and a question of two, of which the last is held back, then an answer and its dot.
    assert [given.tokens for given in handed["up"]] == [17, 37, 57, 77]
    assert [given.mapped for given in handed["up"]] == [13, 30, 47, 64]
    # Nothing, the other's first turn, both turns between, and so on.
    assert [given.mapped for given in handed["ping_pong"]] == [0, 16, 20, 36]


def fake(drift: np.ndarray, answering: list[str]) -> tuple[list[dict[str, Any]], list[Handed]]:
    """Records whose pattern ``up`` is worse than the ceiling by so many nats, by conversation and turn."""
    records = []
    for n, row in enumerate(drift):
        for turn, lost in enumerate(row):
            nats = {SMALL: 2.0 + n, LARGE: 1.0 + n}
            nats["up"] = nats[answering[turn]] + 2 * lost
            common = {"id": f"{n}/{turn}", "document": str(n), "kind": "text", "turn": turn + 1, "tokens": 2}
            records.append({**common, "nats": nats})
    return records, [Handed(name, turn, 4 * turn, 9) for turn, name in enumerate(answering)]


def test_the_slope_is_that_of_each_conversation_in_the_mean() -> None:
    turns = np.arange(5)
    slopes = np.array([0.1, 0.3, 0.2, 0.15])
    records, handed = fake(0.5 + slopes[:, None] * turns, [LARGE] * 5)
    found = summarise_pattern(records, "up", handed)
    assert found["slope_nats"]["difference"] == pytest.approx(slopes.mean())
    assert found["slope_nats"]["t_p"] < 0.05
    assert found["slope_correct"] is None
    assert found["turns"][3]["tests"]["mapped_vs_ceiling"]["nll_difference"] == pytest.approx(0.5 + 3 * slopes.mean())
    assert found["pooled"]["tests"]["mapped_vs_ceiling"]["nll_difference"] == pytest.approx(0.5 + 2 * slopes.mean())
    assert found["pooled"]["tests"]["mapped_vs_source"]["nll_difference"] == pytest.approx(2 * slopes.mean())


def test_the_difference_between_two_models_is_no_slope() -> None:
    names = [SMALL, LARGE] * 3
    level = np.array([0.0 if name == SMALL else 1.0 for name in names])
    records, handed = fake(np.tile(level, (3, 1)), names)
    slope = summarise_pattern(records, "up", handed)["slope_nats"]
    assert slope["difference"] == pytest.approx(0, abs=1e-12)
    assert slope["t_p"] == 1.0
    growing = level + 0.2 * np.arange(6)
    records, handed = fake(np.tile(growing, (3, 1)), names)
    assert summarise_pattern(records, "up", handed)["slope_nats"]["difference"] == pytest.approx(0.2)


def test_two_turns_of_two_models_have_no_slope() -> None:
    records, handed = fake(np.ones((3, 2)), [SMALL, LARGE])
    assert summarise_pattern(records, "up", handed)["slope_nats"] is None


def test_the_report_is_made_from_the_json_alone_and_has_the_figure(done: Path) -> None:
    results = results_of(done)
    assert (done / "report.md").read_text() == render(results)
    assert (done / "figures" / "multiturn_drift.png").stat().st_size > 10_000
    assert "small model alone" in results["verdict"]["sentence"]
    assert "the source" not in results["verdict"]["sentence"]


def test_the_other_direction_s_map_is_fitted_and_named(done: Path, tiny_folders: tuple[Path, Path]) -> None:
    inputs = results_of(done)["provenance"]["inputs"]
    outputs = done.parents[1]
    assert (outputs / "train" / inputs["reverse"] / "manifest.json").is_file()
    assert inputs["reverse_map"] != inputs["map"]
    named = [*SMALL_RUN, f"eval.reverse_map={inputs['reverse']}"]
    assert run("evaluate", outputs, *toy_models(tiny_folders), *named) == done
    wrong = [*SMALL_RUN, f"eval.reverse_map={inputs['train']}"]
    with pytest.raises(KvxferError, match="direction"):
        run("evaluate", outputs, *toy_models(tiny_folders), *wrong)
    with pytest.raises(KvxferError, match=r"eval\.reverse_map=nowhere is no directory"):
        run("evaluate", outputs, *toy_models(tiny_folders), *SMALL_RUN, "eval.reverse_map=nowhere")


def test_a_reversed_run_plays_the_same_conversations(done: Path, tiny_folders: tuple[Path, Path]) -> None:
    other = run("evaluate", done.parents[1], *toy_models(tiny_folders), *SMALL_RUN, "pair.reverse=true")
    here, there = results_of(done)["data"]["items"], results_of(other)["data"]["items"]
    for a, b in zip(here, there, strict=True):
        assert a["nats"] == pytest.approx(b["nats"], abs=1e-4)


def test_text_goes_on_segment_by_segment(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    words = [word for word in VOCABULARY if word.isalpha()]
    (tmp_path / "text").mkdir()
    for n in range(100):
        (tmp_path / "text" / f"{n}.txt").write_text(" ".join(rng.choices(words, k=200)))
    given = ["corpus=text", f"corpus.path={tmp_path / 'text'}", *toy_models(tiny_folders), "corpus.skip_first=4"]
    asked = ["eval=multiturn", "eval.rows=3", "eval.turns=2", "eval.segment=8", "eval.patterns=[up]"]
    data = results_of(run("evaluate", tmp_path / "outputs", *given, *asked))["data"]
    assert list(data["patterns"]) == ["up"]
    assert not data["answers"]
    assert [item["tokens"] for item in data["items"]] == [8] * 6
    assert data["patterns"]["up"]["turns"][1]["mapped"] == 2 * 8 - 4 - 1 - 1


def test_the_other_direction_is_needed_only_where_a_pattern_hands_over_in_it() -> None:
    assert not Multiturn("m", patterns=("up",)).needs_reverse(reverse=False)
    assert Multiturn("m", patterns=("up",)).needs_reverse(reverse=True)
    assert not Multiturn("m", patterns=("down",)).needs_reverse(reverse=True)
    assert Multiturn("m", patterns=("ping_pong",)).needs_reverse(reverse=True)


@pytest.mark.parametrize(
    "override",
    ["turns=1", "stories=1", "rows=1", "segment=1", "batch_size=0", "seed=-1", "max_hops=-1", "patterns=[]"],
)
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path: Path, override: str) -> None:
    with pytest.raises(KvxferError, match=rf"eval\.{override.split('=')[0]}="):
        settings_of("evaluate", tmp_path, "eval=multiturn", f"eval.{override}")


@pytest.mark.parametrize("override", ["turns=11", "segment=12"])
def test_what_the_toy_world_cannot_tell_is_refused_by_name(
    done: Path, tiny_folders: tuple[Path, Path], override: str
) -> None:
    with pytest.raises(KvxferError, match=rf"eval\.{override}"):
        run("evaluate", done.parents[1], *toy_models(tiny_folders), *SMALL_RUN, f"eval.{override}")
