"""Free decoding: same luck for all, KL along the ceiling's tokens, and where texts part."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import mapped_conditions
from kvxfer.evals.generation import CONDITIONS, Decoded, Decoder, gumbel, summarise_decoding
from kvxfer.evals.items import Item, toy_items
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.report.rendering import render
from kvxfer.toy.world import VOCABULARY
from tests.random_maps import identity_map, random_map
from tests.small_runs import results_of, run, settings_of, toy_models

pytestmark = pytest.mark.draws

SMALL_RUN = ["eval=generation", "eval.stories=3", "eval.questions=2", "eval.new_tokens=5", "eval.samples=2"]
PLAN = Plan("all", 0, 1)
KNOWN = tuple(name for name in CONDITIONS if name != "ancestor_copy")
"""Of a pair that is not kin."""


def asked(pair: Pair, stories: int = 3) -> list[Item]:
    return toy_items(pair.tokenizer, 48, stories, questions=2, seed=0)


def decode(pair: Pair, mapper: Mapper, batch_size: int = 4, samples: int = 2) -> dict[str, Decoded]:
    return Decoder(5, samples, 1.0, 0).decode(Transfer(pair, mapper, PLAN), asked(pair), batch_size, lambda n: None)


@pytest.fixture(scope="module")
def done(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("evaluate", tmp_path_factory.mktemp("outputs"), *toy_models(tiny_folders), *SMALL_RUN)


def test_noise_is_gumbel_s_and_the_same_for_the_same_item_sample_and_seed() -> None:
    items = [Item(str(n), "d", "text", (1, 2), 2, ()) for n in range(2)]
    noise = gumbel(0, items, 0, 2000, 3)
    assert torch.equal(noise[1:], gumbel(0, items[1:], 0, 2000, 3))
    for other in (gumbel(1, items, 0, 2000, 3), gumbel(0, items, 1, 2000, 3)):
        assert not torch.equal(noise, other)
    assert not torch.equal(noise[0], noise[1])
    # The largest of logits and noise is a draw from the softmax.
    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = torch.bincount((noise + logits).argmax(-1).flatten(), minlength=3) / 4000
    assert torch.allclose(drawn, torch.softmax(logits, 0), atol=0.03)
    # Euler's constant.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.05)


def test_a_map_that_loses_nothing_writes_what_the_ceiling_writes(tiny_pair: Pair) -> None:
    same = replace(tiny_pair, source=tiny_pair.target)
    found = decode(same, Mapper(identity_map(same)))
    for name in ("source", "mapped"):
        assert np.array_equal(found[name].tokens, found["ceiling"].tokens)
        assert np.array_equal(found[name].samples, found["ceiling"].samples)
        assert found[name].kl.max() < 1e-5
        assert found[name].top.all()
    assert not np.array_equal(found["ceiling"].samples[:, 0], found["ceiling"].samples[:, 1])
    assert found["floor"].kl.min() > 1e-4


def test_batches_do_not_matter(tiny_pair: Pair) -> None:
    mapper = Mapper(random_map(tiny_pair, DESIGNS["same"]))
    one, other = decode(tiny_pair, mapper, batch_size=6), decode(tiny_pair, mapper, batch_size=4)
    assert tuple(one) == tuple(other) == KNOWN
    for name in KNOWN:
        assert np.array_equal(one[name].tokens, other[name].tokens)
        assert np.array_equal(one[name].samples, other[name].samples)
        assert np.allclose(one[name].kl, other[name].kl, atol=1e-5)


def test_kl_is_that_of_a_plain_loop_along_the_ceiling_s_tokens(tiny_pair: Pair) -> None:
    mapper = Mapper(random_map(tiny_pair, DESIGNS["previous"]))
    found, items = decode(tiny_pair, mapper, samples=0), asked(tiny_pair)
    assert found["ceiling"].samples.shape == (6, 0, 5)
    for n, item in enumerate(items):
        prompt = torch.tensor([item.prompt])
        text, past = prompt, mapped_conditions(Transfer(tiny_pair, mapper, PLAN), prompt)["mapped"].past
        for step in range(5):
            p = tiny_pair.target.logits(text)[0, -1].double().softmax(0)
            tail = text[:, prompt.shape[1] - 1 :]
            q = tiny_pair.target.logits(tail, past)[0, -1].double().softmax(0)
            assert found["mapped"].kl[n, step] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-4)
            assert found["mapped"].top[n, step] == (int(q.argmax()) == int(p.argmax()))
            assert found["ceiling"].tokens[n, step] == int(p.argmax())
            text = torch.cat([text, p.argmax()[None, None]], dim=1)


def made(mapped: list[list[int]], samples: list[list[list[int]]]) -> dict[str, Decoded]:
    """What the mapped cache writes where the ceiling always writes 1 2 3 4."""

    def of(tokens: list[list[int]], drawn: list[list[list[int]]], kl: float) -> Decoded:
        rows = np.array(tokens)
        return Decoded(rows, np.array(drawn), np.full(rows.shape, kl), rows == [1, 2, 3, 4])

    count = len(mapped)
    ceiling = of([[1, 2, 3, 4]] * count, [[[1, 2, 3, 4]] * 2] * count, 0.0)
    other = of([[9, 2, 3, 9]] * count, [[[9, 9, 9, 9]] * 2] * count, 1.0)
    return {"ceiling": ceiling, "source": other, "mapped": of(mapped, samples, 0.5), "floor": other}


def test_texts_part_where_they_first_differ() -> None:
    items = [Item(f"{n}", f"d{n}", "who", (5, 6), 1, (1,), ((1,), (7,))) for n in range(4)]
    greedy = [[1, 2, 3, 4], [1, 2, 9, 4], [1, 9, 9, 9], [9, 2, 3, 4]]
    drawn = [[[1, 2, 3, 4], [1, 2, 3, 9]]] * 4
    found = summarise_decoding(items, made(greedy, drawn), dot=2)
    row = found["conditions"]["mapped"]
    assert row["never"] == 0.25
    assert row["parts"] == 2.5
    assert row["agreement"] == pytest.approx((4 + 3 + 1 + 3) / 16)
    assert row["exact"] == 0.5
    assert row["exact_sampled"] == 1.0
    assert (row["never_sampled"], row["agreement_sampled"]) == (0.5, 7 / 8)
    # Half of the sampled texts never part, the others at the last token.
    assert row["parts_sampled"] is None
    assert [item["parts"]["mapped"] for item in found["items"]] == [None, 3, 2, 1]
    step = found["steps"]["mapped"]
    assert step["agreement"] == [0.75, 0.75, 0.5, 0.75]
    assert step["same_greedy"] == [0.75, 0.5, 0.25, 0.25]
    assert step["same_sampled"] == [1.0, 1.0, 1.0, 0.5]
    test = found["tests"]["mapped_vs_source"]
    assert (test["exact_difference"], test["exact_p"]) == (0.5, 0.5)
    assert (test["kl_difference"], test["documents"]) == (-0.5, 4)
    assert found["conditions"]["ceiling"]["parts"] is None


def test_without_answers_and_samples_there_is_no_exact_match() -> None:
    items = [Item(f"{n}", f"d{n}", "text", (5, 6), 2, ()) for n in range(2)]
    decoded = {
        name: replace(part, samples=np.zeros((2, 0, 4), dtype=np.int64))
        for name, part in made([[1, 2, 3, 4], [1, 9, 3, 4]], [[[1, 2, 3, 4]] * 2] * 2).items()
    }
    found = summarise_decoding(items, decoded, None)
    row = found["conditions"]["mapped"]
    assert [row[key] for key in ("exact", "exact_sampled", "agreement_sampled", "never_sampled", "parts_sampled")] == [
        None
    ] * 5
    assert found["tests"]["mapped_vs_source"]["exact_p"] is None
    assert "same_sampled" not in found["steps"]["mapped"]


def test_the_report_is_made_from_the_json_alone_and_has_its_figures(done: Path) -> None:
    results = results_of(done)
    assert (done / "report.md").read_text() == render(results)
    for name in ("steps", "divergence"):
        assert (done / "figures" / f"generation_{name}.png").stat().st_size > 10_000
    assert "nats of KL from the ceiling per token" in results["verdict"]["sentence"]
    assert set(results["data"]["conditions"]) == set(KNOWN)
    assert set(results["data"]["tests"]) == {
        *(f"mapped_vs_{name}" for name in KNOWN if name != "mapped"),
        *("source_vs_ceiling", "source_vs_no_context"),
    }
    assert len(results["data"]["items"]) == 6


def test_other_text_goes_on_from_a_prefix(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    (tmp_path / "text").mkdir()
    for n in range(100):
        (tmp_path / "text" / f"{n}.txt").write_text(" ".join(rng.choices(VOCABULARY[6:], k=200)))
    given = ["corpus=text", f"corpus.path={tmp_path / 'text'}", *toy_models(tiny_folders), "corpus.skip_first=4"]
    outputs = tmp_path / "outputs"
    done = run("evaluate", outputs, *given, "eval=generation", "eval.rows=3", "eval.new_tokens=4", "eval.samples=0")
    results = results_of(done)
    assert not results["data"]["answers"]
    assert (done / "report.md").read_text() == render(results)
    assert "exact match" not in results["verdict"]["sentence"].lower()


@pytest.mark.parametrize(
    "override",
    ["stories=1", "questions=0", "rows=1", "new_tokens=0", "batch_size=0", "samples=-1", "seed=-1", "prefix=1"]
    + [f"temperature={value}" for value in ("0", "-1", "inf", "nan")],
)
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path: Path, override: str) -> None:
    with pytest.raises(KvxferError, match=rf"eval\.{override.split('=')[0]}="):
        settings_of("evaluate", tmp_path, "eval=generation", f"eval.{override}")


def test_an_answer_must_fit(done: Path, tiny_folders: tuple[Path, Path]) -> None:
    for override in ("eval.new_tokens=1", "eval.new_tokens=100000"):
        with pytest.raises(KvxferError, match=r"eval\.new_tokens"):
            run("evaluate", done.parents[1], *toy_models(tiny_folders), *SMALL_RUN, override)
