"""What validation measures is what the evaluations and the closed forms' probe measure, in batches or at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_pairs import disturbed, pair_of, rows_of, true_content

from kvxfer.evals.diagnostics import Diagnosis
from kvxfer.fitting.closed.attention import LayerAttention
from kvxfer.fitting.trained.activations import Activations, ActivationStore
from kvxfer.fitting.trained.measures import Measures, Spread
from kvxfer.fitting.trained.objective import Objective
from kvxfer.fitting.trained.specs import Trained
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.plan import Plan
from kvxfer.maps.views import Views
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments.layout import Layout
from kvxfer.moments.probe import Probe
from kvxfer.moments.probe_pass import save_probe

EXACT, SPLIT, TOKENS = 3, 14, 24
FAMILIES = ["qwen3-default", "llama-yarn", "phi3-default"]


class Given(Mapper):
    """A mapper that gives what it was made with."""

    def __init__(self, content: KV) -> None:
        self.content = content.apply(torch.detach)
        # Looking back at all, it is told where in the row it is.
        self.lookback, self.needs_hidden = 10**6, False

    def known(self, ids: Tensor | None) -> Any:
        return None

    def run(self, source: Views, target: Views, known: Any, first: int, *unused: Any) -> None:
        own = Views.of(self.content)
        count = target.keys[0].shape[1]
        rows, there, taken = slice(None), slice(0, count), slice(first, first + count)
        for kind, layer in itertools.product(KINDS, range(self.content.layers)):
            turn = target.turn(rows, there)
            target.put(kind, layer, rows, there, turn, getattr(own, kind)[layer][:, taken])


def read(pair: Pair) -> Activations:
    return ActivationStore(pair, set(), rows_of(3, TOKENS), 0.0, logits=True).batch(range(3))


def measured(pair: Pair, batch: Activations, mapped: KV, **options: Any) -> Measures:
    return Objective(pair, Trained("any", **options), EXACT).measures(batch, mapped, SPLIT)


def some_rows(batch: Activations, rows: slice) -> Activations:
    def cut(found: Any) -> Any:
        return [x[rows] for x in found] if isinstance(found, list) else found[rows]

    return Activations(
        **{k: x if k == "known" else x.rows(rows) if isinstance(x, KV) else cut(x) for k, x in vars(batch).items()}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_and_cosine_are_those_of_the_diagnostics(family: str) -> None:
    pair = pair_of(family)
    batch = read(pair)
    content = disturbed(batch)
    found = measured(pair, batch, content)
    # The evaluation leaves out the last token of the answer, whose successor it does not know.
    wanted = Diagnosis(Transfer(pair, Given(content), Plan("plan", exact_first=EXACT, hold_back=1)))
    answer = torch.cat([batch.ids[:, SPLIT + 1 :], batch.ids[:, :1]], dim=1)
    wanted.add(batch.ids[:, : SPLIT + 1], answer)
    scores = wanted.predictions["mapped"].summary(["a", "b", "c"])
    assert found.kl == pytest.approx(scores["kl"]["value"], rel=1e-4)
    assert found.tokens == 3 * (TOKENS - SPLIT)
    for layer, ratios in enumerate(wanted.outputs):
        assert float(found.cosine[layer]) == pytest.approx(ratios.values()[0], rel=1e-5)
    assert float(found.cosine.max()) < 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_scores_are_those_of_the_probe(family: str, tmp_path: Path) -> None:
    pair = pair_of(family)
    batch = read(pair)
    content = disturbed(batch)
    layout = Layout.of(DESIGNS["same"], [0, 1], 2, 32, 2, {})
    save_probe(pair, batch.ids, layout, EXACT, tmp_path / "probe.safetensors")
    probe = Probe.load(tmp_path / "probe.safetensors")
    losses = Objective(pair, Trained("any", queries="prefix"), EXACT).losses(batch, content, SPLIT)
    assert losses.attention is not None
    found = measured(pair, batch, content)
    for layer in range(2):
        score = LayerAttention(probe, layer).score(content.keys[layer].detach(), content.values[layer].detach())
        assert float(found.attention_score[layer]) == pytest.approx(score, abs=1e-5)
        assert float(losses.attention[layer].detach()) == pytest.approx(1 - score, abs=1e-5)


def test_the_true_cache_is_perfect_and_trained_layers_make_no_difference() -> None:
    pair = pair_of("qwen3-default")
    batch = read(pair)
    perfect = measured(pair, batch, true_content(batch))
    assert perfect.kl == pytest.approx(0, abs=1e-6)
    for each in (perfect.cosine, perfect.attention_score):
        assert torch.allclose(each, torch.ones_like(each), atol=1e-6)
    content = disturbed(batch)
    whole, one = (measured(pair, batch, content, layers=layers) for layers in (None, (1,)))
    assert torch.equal(whole.cosine, one.cosine)
    assert torch.equal(whole.attention_score, one.attention_score)


def test_batches_leave_no_trace() -> None:
    pair = pair_of("qwen3-default")
    batch = read(pair)
    content = disturbed(batch)
    whole = measured(pair, batch, content)
    parts = [measured(pair, some_rows(batch, rows), content.rows(rows)) for rows in (slice(0, 1), slice(1, 3))]
    found = Measures.over(parts)
    assert (found.tokens, found.attention.tokens) == (whole.tokens, whole.attention.tokens)
    assert found.kl == pytest.approx(whole.kl, rel=1e-5)
    for name in ("cosine", "attention_score"):
        assert torch.allclose(getattr(found, name), getattr(whole, name), atol=1e-6), name
    assert abs(float(parts[0].attention_score[0] - whole.attention_score[0])) > 1e-4


def test_a_spread_by_hand() -> None:
    true = torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]])
    spread = Spread.of([true, torch.ones_like(true)], [true + 1, true])
    assert spread.tokens == 4
    assert spread.error.tolist() == [4, 1 + 1 + 9 + 25]
    assert spread.deviation.tolist() == [9 + 1 + 1 + 9, 0]
    assert spread.explained.tolist() == [1 - 4 / 20, 0]
    merged = Spread.of([true[:1]], [true[:1] + 1]).merged(Spread.of([true[1:]], [true[1:] + 1]))
    assert merged.explained.tolist() == [0.8]
    assert merged.mean.tolist() == [[3.0]]
