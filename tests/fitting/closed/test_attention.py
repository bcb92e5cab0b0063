"""Attention-output scores are what the model's own attention says of content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.attention import LayerAttention, map_scores
from kvxfer.fitting.closed.judges import AttentionScore
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS, Block
from kvxfer.maps.columns import read_source
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models import rope
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair
from kvxfer.models.spec import ModelSpec, PairSpec
from kvxfer.moments.calibration import CalibrationSpec, layout_for
from kvxfer.moments.probe import PROBE, Probe
from kvxfer.moments.probe_pass import save_probe
from kvxfer.moments.random_file import draw_random
from tests.doubles import FAMILIES, tiny_model, tiny_tokenizer
from tests.samples import make_probe, make_samples, make_splits

ROWS, TOKENS, EXACT = 3, 24, 2


def pair_of(family: str) -> Pair:
    """A model as its own source and target."""
    lm = tiny_model(family)
    model = LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")
    spec = PairSpec("same", ModelSpec(family), ModelSpec(family), "float32", "cpu")
    return Pair(spec, model, model, "tokens")


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 300, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def probe_of(pair: Pair, folder: Path, design: str = "same") -> Probe:
    """A saved and loaded probe of random rows."""
    layout = layout_for(pair, CalibrationSpec(features=DESIGNS[design]))
    save_probe(pair, tokens(), layout, EXACT, folder / PROBE)
    return Probe.load(folder / PROBE, draw_random(layout))


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


@pytest.mark.parametrize("family", FAMILIES)
def test_true_content_gives_the_models_own_attention_output(family: str, tmp_path: Path) -> None:
    pair = pair_of(family)
    probe = probe_of(pair, tmp_path)
    for layer, wanted in enumerate(own_outputs(pair.target, tokens())):
        attention = LayerAttention(probe, layer)
        output = attention.output(attention.keys, attention.values)
        assert torch.allclose(output, wanted, atol=1e-5 * float(wanted.abs().max()))
        assert attention.score() == attention.score(keys=attention.keys, values=attention.values) == 1.0


def test_scores_are_those_of_the_definition() -> None:
    """Spelt out with an explicit mask and one head at a time."""
    probe = make_probe(make_samples(DESIGNS["both"], tokens=40), exact=3)
    attention = LayerAttention(probe, 0)
    true = attention.keys, attention.values
    draw = torch.Generator().manual_seed(1)
    wrong = tuple(x + 0.3 * torch.randn(x.shape, generator=draw) for x in true)
    angles = probe.tensors["cos"], probe.tensors["sin"]
    query = rope.restore(probe.rows("target.queries.0"), *angles).double()

    def output(keys: Tensor, values: Tensor) -> Tensor:
        keys, values = rope.restore(keys, *angles).double(), values.double()
        heads = []
        for head in range(4):
            logits = query[:, head] @ keys[:, head // 2].mT * 3**-0.5
            logits = logits.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
            heads.append(logits.softmax(-1) @ values[:, head // 2])
        return (torch.cat(heads, dim=-1) @ probe.tensors["target.output.0"].double().T)[:, 3:]

    kept = tuple(torch.cat([t[:, :, :3], w[:, :, 3:]], dim=2) for t, w in zip(true, wrong, strict=True))
    wanted = output(*true)
    total = (wanted - wanted.mean((0, 1))).square().sum()
    for given in ({"keys": 0}, {"values": 1}, {"keys": 0, "values": 1}):
        mapped = output(*(kept[n] if kind in given else true[n] for n, kind in enumerate(KINDS)))
        expected = 1 - float((mapped - wanted).square().sum() / total)
        found = attention.score(**{kind: wrong[n] for kind, n in given.items()})
        assert found == pytest.approx(expected, abs=1e-5)
        assert found < 0.99


def test_a_map_that_is_the_identity_scores_one(tmp_path: Path) -> None:
    """Where source and target are one model, each layer is its own perfect source."""
    pair = pair_of("qwen3-yarn")
    probe = probe_of(pair, tmp_path)
    width = pair.target.geometry.kv_width
    eye, nothing = torch.eye(width)[None], torch.zeros(width)
    layers = {(n, kind): LinearLayer((Block(n, kind),), eye, nothing) for n in range(2) for kind in KINDS}
    for found in map_scores(layers, probe).values():
        assert found == {"attention_score": pytest.approx(1.0), "attention_score_joint": pytest.approx(1.0)}
    layers[1, "values"] = LinearLayer((Block(1, "values"),), 0 * eye, nothing)
    scores = map_scores(layers, probe)
    assert scores[1, "keys"]["attention_score"] == pytest.approx(1.0)
    assert scores[1, "values"]["attention_score"] == scores[1, "keys"]["attention_score_joint"] < 0.5


@pytest.mark.parametrize("design", ["previous", "embedding", "layer0", "relu", "products", "hidden"])
def test_columns_are_those_that_a_map_reads(design: str, tmp_path: Path) -> None:
    pair = pair_of("llama-llama3")
    probe = probe_of(pair, tmp_path, design)
    layout_blocks = DESIGNS[design].blocks("keys", [0, 1])
    read = probe.design(layout_blocks)
    draw = torch.Generator().manual_seed(0)
    width = pair.target.geometry.kv_width
    layer = LinearLayer(
        layout_blocks, torch.randn(1, read.shape[-1], width, generator=draw), torch.randn(width, generator=draw)
    )
    cache_map = CacheMap({(0, kind): layer for kind in KINDS}, {}, probe.random)
    content = pair.content("source", read_source(pair, tokens(), layout_blocks))
    mapped = Mapper(cache_map, pair=pair).map(content, tokens()).keys[0]
    ours = (read @ layer.dense() + layer.bias).unflatten(-1, (2, -1)).transpose(1, 2)
    assert torch.allclose(ours, mapped, atol=1e-4 * float(mapped.abs().max()))


def test_rows_that_are_not_finite_are_left_out() -> None:
    probe = make_probe(make_samples(DESIGNS["same"], tokens=40))
    rows = {n: torch.cat([x, x * torch.nan]) for n, x in probe.tensors.items() if n.startswith(("source", "target.k"))}
    rows |= {n: x.repeat(2, 1, 1, 1) for n, x in probe.tensors.items() if n.startswith(("target.v", "target.q"))}
    both = Probe({**probe.tensors, **rows, "good": torch.tensor([True, False])})
    assert both.rows("target.keys.0").isfinite().all()
    assert LayerAttention(both, 0).total == pytest.approx(LayerAttention(probe, 0).total)
    with pytest.raises(KvxferError, match=r"no row of the probe is finite: try pair\.dtype=float32"):
        Probe({**both.tensors, "good": torch.tensor([False, False])}).rows("target.keys.0")


def test_an_output_that_does_not_vary_scores_nothing() -> None:
    probe = make_probe(make_samples(DESIGNS["same"], tokens=40))
    still = Probe({**probe.tensors, "target.output.0": torch.zeros(8, 12)})
    assert LayerAttention(still, 0).score() == 0.0


def test_longer_than_the_window_is_refused(tmp_path: Path) -> None:
    pair = pair_of("windowed-default")
    layout = layout_for(pair, CalibrationSpec())
    with pytest.raises(KvxferError, match=r"calibration\.probe_tokens: 65 tokens.*sliding window of 64"):
        save_probe(pair, torch.ones(1, 65, dtype=torch.long), layout, 0, tmp_path / PROBE)


def test_attention_that_is_more_than_a_softmax_is_refused() -> None:
    for extra in ("sinks", "attn_logit_softcapping"):
        model = pair_of("qwen3-default").target
        setattr(model.body.layers[1].self_attn, extra, 30.0)
        with pytest.raises(KvxferError, match=rf"layer 1's attention has {extra}.*calibration\.probe_rows=0"):
            model.attention_outputs()
    del model.body.layers[0].self_attn.o_proj
    with pytest.raises(KvxferError, match=r"layer 0 has no o_proj.*calibration\.probe_rows=0"):
        model.attention_outputs()


def test_the_judge_scores_outputs_side_by_side_as_maps_are_scored() -> None:
    splits = make_splits(make_samples(DESIGNS["both"]))
    assert splits.probe is not None
    judge, draw = AttentionScore(splits.probe), torch.Generator().manual_seed(0)
    layers = {}
    for blocks in (DESIGNS["both"].blocks("keys", [0, 2]), DESIGNS["both"].blocks("keys", [1])):
        outputs = [(layer, kind) for kind in KINDS for layer in range(2)]
        held = HeldOut(splits.validation, blocks, outputs)
        weight = torch.randn(6 * len(blocks), 24, generator=draw, dtype=torch.float64) / 6
        bias = torch.randn(24, generator=draw, dtype=torch.float64)
        for n, output in enumerate(outputs):
            own = slice(6 * n, 6 * n + 6)
            layers[output] = LinearLayer(blocks, weight[None, :, own].float(), bias[own].float())
        scores = judge(held, weight, bias)
        found = map_scores(layers, splits.probe)
        assert scores.tolist() == pytest.approx([found[output]["attention_score"] for output in outputs], abs=1e-5)
        assert float(judge(held.only(3), weight[:, 18:], bias[18:])[0]) == pytest.approx(float(scores[3]), abs=1e-5)


def test_scores_read_trunks() -> None:
    """A linear part that is taken apart into a ReLU of either sign scores as the whole."""
    splits = make_splits(make_samples(DESIGNS["both"]))
    assert splits.probe is not None
    draw, blocks = torch.Generator().manual_seed(0), DESIGNS["both"].blocks("keys", [0, 2])
    layers = {
        (layer, kind): LinearLayer(blocks, torch.randn(1, 24, 6, generator=draw) / 5, torch.randn(6, generator=draw))
        for layer in range(2)
        for kind in KINDS
    }
    signs = torch.cat([torch.eye(24), -torch.eye(24)], dim=1)
    readouts = {output: torch.cat([part.weight[0], -part.weight[0]]) for output, part in layers.items()}
    trunk = Trunk(blocks, (signs,), (torch.zeros(48),), "relu", readouts)
    bare = {output: LinearLayer((), torch.zeros(1, 0, 6), part.bias) for output, part in layers.items()}
    whole, apart = map_scores(layers, splits.probe), map_scores(bare, splits.probe, (trunk,))
    for output, scores in whole.items():
        assert apart[output] == pytest.approx(scores, abs=1e-5)
    assert map_scores(bare, splits.probe) != apart
