"""A model without some layers computes what is left of it, and says that it is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.models.hf.load import load_config, load_model
from kvxfer.models.spec import ModelSpec
from tests.doubles import make_double, save, tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, whose last one is also the only one of a second checkpoint's difference."""
    return save(tiny_model("qwen3-default", num_hidden_layers=4), tiny_tokenizer(), tmp_path_factory.mktemp("four"))


def test_what_is_left_is_computed(four: Path) -> None:
    whole = load_model(ModelSpec(str(four)), "float32", "cpu", "eager")
    pruned = load_model(ModelSpec(str(four), drop_layers=(2, 1, 2)), "float32", "cpu", "eager")
    assert (pruned.dropped, whole.dropped) == ((1, 2), ())
    assert pruned.geometry.layers == pruned.prefill(IDS).layers == len(pruned.queries(IDS)[1]) == 2
    assert 2 * pruned.geometry.body_parameters == whole.geometry.body_parameters
    reference = tiny_model("qwen3-default", num_hidden_layers=2)
    state = {k: v for k, v in whole.lm.state_dict().items() if ".layers.1." not in k and ".layers.2." not in k}
    reference.load_state_dict({k.replace(".layers.3.", ".layers.1."): v for k, v in state.items()})
    with torch.no_grad():
        wanted = reference(input_ids=IDS).logits
    assert torch.allclose(pruned.logits(IDS), wanted, atol=1e-5)
    assert torch.allclose(pruned.logits(IDS[:, 4:], pruned.prefill(IDS[:, :4])), wanted[:, 4:], atol=1e-5)
    assert torch.equal(pruned.prefill(IDS).keys[0], whole.prefill(IDS).keys[0])
    assert not torch.equal(pruned.prefill(IDS).keys[1], whole.prefill(IDS).keys[1])


def test_layouts_go_with_their_layers(tmp_path: Path) -> None:
    layouts = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    options = {"layer_types": layouts, "use_sliding_window": True, "sliding_window": 64}
    lm = tiny_model("qwen3-default", num_hidden_layers=4, **options)
    folder = save(lm, tiny_tokenizer(), tmp_path)
    model = load_model(ModelSpec(str(folder), drop_layers=(0,)), "float32", "cpu", "sdpa")
    assert model.geometry.attention == tuple(layouts[1:])
    assert model.lm.config.layer_types == layouts[1:]
    assert model.prefill(IDS).layers == 3


def test_of_a_vision_language_model_the_language_model_is_pruned(tmp_path: Path) -> None:
    folder, _ = make_double("ministral3_3b_8b", tmp_path)
    model = load_model(ModelSpec(str(folder), drop_layers=(1,)), "float32", "cpu", "sdpa")
    assert model.geometry.layers == model.prefill(IDS).layers == 2
    assert model.logits(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ((1, 4), r"^pair.source.drop_layers=\[1, 4\]: no layer 4; the model has layers 0 to 3$"),
        ((-1,), r"^pair.source.drop_layers=\[-1\]: no layer -1; the model has layers 0 to 3$"),
        ((0, 1, 2, 3), r"^pair.source.drop_layers=\[0, 1, 2, 3\]: all 4 layers are dropped; leave 1 or more$"),
    ],
)
def test_layers_that_cannot_be_dropped(four: Path, drop: tuple[int, ...], message: str) -> None:
    with pytest.raises(KvxferError, match=message):
        load_config(ModelSpec(str(four), drop_layers=drop), "pair.source")
