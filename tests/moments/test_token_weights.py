"""What tokens weigh: the attention that a model itself gives them, against an even share."""

from __future__ import annotations

import pytest
import torch

from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.moments.token_weights import attention_received, token_weights
from tests.doubles import tiny_model, tiny_tokenizer
from tests.samples import relative_error

TOKENS = 24


def expected_of(probabilities: torch.Tensor) -> torch.Tensor:
    """The definition, token by token, from ``[batch, heads, queries, keys]``."""
    tokens = probabilities.shape[-1]
    rows = []
    for j in range(tokens - 1):
        later = [probabilities[:, :, i, j].mean(1) * (i + 1) for i in range(j + 1, tokens)]
        rows.append(torch.stack(later).mean(0))
    return torch.stack([*rows, torch.ones(len(probabilities))], dim=1)


@pytest.mark.parametrize("family", ["qwen3-default", "qwen2-llama3", "llama-yarn", "phi3-default"])
def test_it_is_the_attention_of_the_model_itself(family: str) -> None:
    lm = tiny_model(family, attn_implementation="eager")
    for layer in lm.base_model.layers:
        for name, parameter in layer.self_attn.named_parameters():
            if "v_proj" not in name and "o_proj" not in name and parameter.dim() > 1:
                parameter.data *= 8  # so that attention is far from even
    model = LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")
    ids = torch.randint(3, 300, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    kv, queries = model.queries(ids)
    attentions = lm(input_ids=ids, output_attentions=True).attentions
    for query, keys, scale, probabilities in zip(queries, kv.keys, model.softmax_scales(), attentions, strict=True):
        found, expected = attention_received(query, keys, scale), expected_of(probabilities.detach())
        assert relative_error(found, expected.double()) < 1e-4
        assert float(expected.max()) > 1.3


def test_the_models_own_scale_counts() -> None:
    lm = tiny_model("qwen3-default")
    model = LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, "qwen3"), "qwen3", "random")
    assert model.softmax_scales() == [16**-0.5] * 2
    model.body.layers[1].self_attn.scaling = 0.5
    assert model.softmax_scales() == [16**-0.5, 0.5]


def test_even_attention_weighs_every_token_alike() -> None:
    received = attention_received(torch.zeros(1, 4, 9, 8), torch.randn(1, 2, 9, 8), 0.3)
    assert torch.allclose(received, torch.ones(1, 9))


def test_sinks_are_clipped_and_the_mean_is_one() -> None:
    received = torch.tensor([[500.0, 1.0, 2.0, 3.0, 400.0, 2.0], [1.0] * 6])
    weights = token_weights(received, torch.tensor([1, 2, 3, 4, 5]), clip=10.0)
    unscaled = torch.tensor([1.0, 2.0, 3.0, 20.0, 2.0], dtype=torch.float64)
    assert torch.allclose(weights[0], unscaled / unscaled.mean())
    assert torch.equal(weights[1], torch.ones(5, dtype=torch.float64))


def test_a_row_most_of_which_gets_no_attention_counts_as_without_weights() -> None:
    received = torch.tensor([[0.0, 0.0, 0.0, 3.0]])
    assert torch.equal(token_weights(received, torch.arange(4), 10.0), torch.ones(1, 4).double())
