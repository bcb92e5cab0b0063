"""Diagnostics: an exact map is told from a broken one, and every number is what its definition written out gives."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.diagnostics import Diagnostics, attend
from kvxfer.evals.evaluation import Subject
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.report.diagnostics import FIGURES
from kvxfer.report.kinds import REPORTS
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import CorpusSpec
from tests.exact_maps import changed, exact_map, record_fit, with_itself
from tests.small_runs import settings_of

pytestmark = pytest.mark.draws

PLAN = Plan("sinks", exact_first=3, hold_back=2)
TOY = CorpusSpec("toy", "toy", 64)
PREFIX, SCORED, ROWS = 40, 12, 5
FIRST, STOP = PLAN.mapped_span(PREFIX)
EVAL = Diagnostics("diagnostics", prefix=PREFIX, scored=SCORED, rows=ROWS, batch_tokens=2 * (PREFIX + SCORED))
LAYER, KEPT = 1, 0.6


@pytest.fixture(scope="module")
def pair(tiny_pair: Pair) -> Pair:
    return with_itself(tiny_pair)


@pytest.fixture(scope="module")
def exact(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    cache_map = CacheMap(exact_map(pair).layers, {"run": "exact"})
    folder = tmp_path_factory.mktemp("exact")
    record_fit(folder, cache_map)
    return Subject(pair, cache_map, Mapper(cache_map), folder, PLAN, TOY, (replace(TOY, name="other", seed=1),))


@pytest.fixture(scope="module")
def broken(exact: Subject) -> Subject:
    """Keys and values of one layer are scaled down."""
    cache_map = changed(changed(exact.cache_map, LAYER, "keys", KEPT), LAYER, "values", KEPT)
    return replace(exact, cache_map=cache_map, mapper=Mapper(cache_map))


@pytest.fixture(scope="module")
def data(broken: Subject) -> dict[str, Any]:
    return EVAL.measure(broken)


@pytest.fixture(scope="module")
def ids(pair: Pair) -> Tensor:
    return load_rows(TOY, pair.tokenizer, "evaluation", ROWS, PREFIX + SCORED).tokens


def test_an_exact_map_has_cosine_one_and_no_divergence(exact):
    own, other = EVAL.measure(exact)["domains"]
    for domain in (own, other):
        for name in ("cosine", "cosine_output", "r2_keys", "r2_values", "agreement"):
            assert domain[name]["value"] == pytest.approx(1, abs=1e-4)
        assert abs(domain["kl"]["value"]) < 1e-6
    assert own["items"] != other["items"]


def test_maps_are_compared_on_the_same_text_alone(exact, data):
    """Another draw of the same corpus, or another corpus of its name, is another question."""
    again, drawn = (replace(exact, domains=(), corpus=replace(TOY, seed=seed)) for seed in (0, 1))
    assert EVAL.measure(again)["asked"] == data["asked"]
    assert EVAL.measure(drawn)["asked"] != data["asked"]


def test_a_broken_layer_shows_where_it_is(data):
    own = data["domains"][0]
    assert own["kl"]["value"] > 1e-5
    assert own["worst_head"]["layer"] == LAYER
    assert own["worst_head"]["cosine"] < 0.999
    whole = [layer for layer in range(3) if own["r2_keys_layers"][layer] > 0.999]
    assert whole == [0, 2]
    for layer in whole:
        assert own["cosine_heads"][layer] == pytest.approx([1] * 6, abs=1e-5)


def test_a_vocabulary_that_is_padded_further_is_compared_in_the_words_of_both(exact):
    target = exact.pair.target
    lm, width = copy.deepcopy(target.lm), target.geometry.vocabulary + 8
    lm.resize_token_embeddings(width, mean_resizing=False)
    geometry = replace(target.geometry, vocabulary=width)
    padded = LoadedModel(lm, target.tokenizer, geometry, "padded", target.revision)
    for pair in (replace(exact.pair, source=padded), replace(exact.pair, target=padded)):
        own, _ = EVAL.measure(replace(exact, pair=pair))["domains"]
        assert abs(own["kl"]["value"]) < 1e-6
        assert abs(own["predictions"]["source"]["kl"]["value"]) < 1e-6


def own_outputs(model: LoadedModel, ids: Tensor) -> list[Tensor]:
    """What o_proj of each layer gives in the model's own forward."""
    found: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: found.append(output))
        for layer in model.body.layers
    ]
    model.prefill(ids)
    for handle in handles:
        handle.remove()
    return found


def test_attention_is_what_the_model_itself_computes(pair, ids):
    true, queries = pair.target.queries(ids)
    for layer, expected in enumerate(own_outputs(pair.target, ids)):
        projection, scale = pair.target.attention_outputs()[layer]
        weights, heads = attend(queries[layer][:, :, STOP:], true.keys[layer], true.values[layer], scale)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
        assert torch.allclose(heads.transpose(1, 2).flatten(2) @ projection.T, expected[:, STOP:], atol=1e-4)


def test_concentrations_and_cosines_are_their_definitions(pair, ids, data):
    """Token by token in float64, from the true cache and the layer's scaled content alone."""
    true, queries = pair.target.queries(ids[:, :-1])
    content = pair.content("target", true)
    shrunk = pair.rotated("target", KV([KEPT * k for k in content.keys], [KEPT * v for v in content.values]))
    _, scale = pair.target.attention_outputs()[LAYER]
    key_ratio, value_ratio, cosines = ([[0.0, 0.0] for _ in range(6)] for _ in range(3))
    for row in range(ROWS):
        for head in range(6):
            k, v = (getattr(true, kind)[LAYER][row, head // 3].double() for kind in ("keys", "values"))
            k_, v_ = (getattr(shrunk, kind)[LAYER][row, head // 3].double().clone() for kind in ("keys", "values"))
            for mine, theirs in ((k_, k), (v_, v)):
                mine[:FIRST], mine[STOP:] = theirs[:FIRST], theirs[STOP:]
            e, u = k_ - k, (v_ - v)[FIRST:STOP].square().sum(1)
            for at in range(STOP, PREFIX + SCORED - 1):
                q = queries[LAYER][row, head, at].double()
                a, b = (torch.softmax(scale * q @ keys[: at + 1].T, 0) for keys in (k, k_))
                looked = a[FIRST:STOP].square()
                value_ratio[head][0] += float((looked * u).sum())
                value_ratio[head][1] += float(looked.sum() * u.mean())
                key_ratio[head][0] += float((e[FIRST:STOP] @ q).square().sum())
                key_ratio[head][1] += float(q.square().sum() * e[FIRST:STOP].square().sum() / len(q))
                cosines[head][0] += float(torch.cosine_similarity(a @ v[: at + 1], b @ v_[: at + 1], 0))
                cosines[head][1] += 1
    own = data["domains"][0]
    assert own["cosine_heads"][LAYER] == pytest.approx([a / b for a, b in cosines], abs=1e-5)
    assert own["concentration_values_layers"][LAYER] == pytest.approx(
        np.mean([a / b for a, b in value_ratio]), rel=1e-3
    )
    grouped = [np.sum(key_ratio[at : at + 3], axis=0) for at in (0, 3)]
    assert own["concentration_keys_layers"][LAYER] == pytest.approx(np.mean([a / b for a, b in grouped]), rel=1e-3)


def test_divergence_is_that_of_plain_forwards(pair, ids, data, broken):
    ceiling = pair.target.logits(ids)[:, -SCORED - 1 : -1]
    head = ids[:, :STOP]
    mapped = pair.rotated("target", broken.mapper.map(pair.content("source", pair.source.prefill(head))))
    cache = KV.join([pair.target.prefill(head[:, :FIRST]), mapped.span(FIRST, STOP)])
    found = pair.target.logits(ids[:, STOP:], cache)[:, -SCORED - 1 : -1]
    p, q = (torch.log_softmax(each.double(), -1) for each in (ceiling, found))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    own = data["domains"][0]
    assert own["kl"]["value"] == pytest.approx(float(expected.mean()), rel=1e-2, abs=1e-7)
    agreed = (ceiling.argmax(-1) == found.argmax(-1)).double().mean()
    assert own["agreement"]["value"] == pytest.approx(float(agreed))
    assert own["kl"]["ci"][0] <= own["kl"]["value"] <= own["kl"]["ci"][1]
    # A source that is the target is the ceiling.
    assert abs(own["predictions"]["source"]["kl"]["value"]) < 1e-6


def test_the_report_comes_from_the_json_and_names_the_fit(data, tmp_path):
    told = json.loads(json.dumps(data, allow_nan=False))
    verdict = REPORTS["diagnostics"].verdict(told)
    assert verdict.kind == "worse"
    assert "less closely than the source does: KL" in verdict.sentence
    lines = REPORTS["diagnostics"].sections(told)
    assert "correlation" not in told
    assert "fit's | R² values" in lines
    REPORTS["diagnostics"].figures(told, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(FIGURES)
    assert all(np.isfinite(value) for value in REPORTS["diagnostics"].metrics(told).values())


def test_settings(exact, tmp_path):
    settings = settings_of("evaluate", tmp_path, "eval=diagnostics", "eval.domains=[toy_shuffled]")
    assert isinstance(settings.eval, Diagnostics)
    with pytest.raises(KvxferError, match=r"eval\.domains names toy_shuffled more than once"):
        settings_of("evaluate", tmp_path, "eval=diagnostics", "eval.domains=[toy_shuffled,toy_shuffled]")
    with pytest.raises(KvxferError, match=r"eval\.rows=1 must be 2"):
        Diagnostics("diagnostics", rows=1)
    with pytest.raises(KvxferError, match=r"eval\.prefix=1 must be 2"):
        Diagnostics("diagnostics", prefix=1)
    with pytest.raises(KvxferError, match=r"eval\.prefix=null, and nothing beside the map"):
        Diagnostics("diagnostics").measure(exact)
    with pytest.raises(KvxferError, match=r"eval\.prefix=5 leaves no token to map"):
        Diagnostics("diagnostics", prefix=5).measure(exact)
    with pytest.raises(KvxferError, match=r"eval\.prefix and eval\.scored: 5064 tokens"):
        Diagnostics("diagnostics", prefix=5000).measure(exact)


def test_a_map_of_no_numbers_is_refused(exact):
    cache_map = changed(exact.cache_map, 0, "keys", float("nan"))
    with pytest.raises(KvxferError, match="not finite numbers; check the map"):
        EVAL.measure(replace(exact, cache_map=cache_map, mapper=Mapper(cache_map)))
