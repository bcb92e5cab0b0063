"""What a pair can't do is told before the pass that would need it, with the setting that does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

import kvxfer.experiment.stages.calibrate as stage
from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.gates import TOLERANCE
from kvxfer.experiment.stages import dry_row
from kvxfer.experiment.stages.dry_row import refuse_unfit, try_row
from kvxfer.models.hf.cache import build_cache
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair
from kvxfer.text.corpus import Rows
from tests.doubles import save, tiny_model, tiny_tokenizer
from tests.small_runs import TEXT_ROWS, settings_of, toy_models, write_text

SHAPE: dict[str, Any] = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": None}
SHAPE |= {"bos_token_id": 1, "eos_token_id": 2}


class PassBegan(Exception):
    """The pass over all rows, which is to be reached or not."""


def no_pass(*_: Any) -> None:
    raise PassBegan


@pytest.fixture(scope="module")
def pythia(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for two models whose layers have no ``self_attn``, and for a little text."""
    home = tmp_path_factory.mktemp("pythia")
    for seed, side in enumerate(("source", "target")):
        torch.manual_seed(seed)
        save(GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)), tiny_tokenizer(), home / side)
    models = [f"pair.{side}.model={home / side}" for side in ("source", "target")]
    return ["pair=custom", "pair.dtype=float32", *models, "corpus=text", f"corpus.path={write_text(home / 'text')}"]


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        (["calibration.metrics=true"], "calibration.metrics=false"),
        (["calibration.metrics=false", "calibration.weights=attention"], "calibration.weights=none"),
        (["calibration.metrics=false", "calibration.probe_rows=2"], "calibration.probe_rows=0"),
        (["calibration.metrics=false"], None),
    ],
)
def test_an_attention_class_that_hides_its_output_is_refused_before_the_pass(
    asked: list[str], instead: str | None, pythia: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "accumulate", no_pass)
    settings = settings_of("calibrate", tmp_path, *pythia, *TEXT_ROWS, *asked)
    said = None if instead is None else rf"target: layer 0 has no self_attn.*; set {instead}$"
    with pytest.raises(PassBegan if instead is None else KvxferError, match=said):
        stage.calibrate(settings)


def test_a_map_that_is_trained_on_attention_outputs_is_refused_before_its_base_is_calibrated(
    pythia: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "accumulate", no_pass)
    settings = settings_of(
        "train", tmp_path, *pythia, *TEXT_ROWS, "solver=residual", "solver.k=1", "calibration.metrics=false"
    )
    with pytest.raises(KvxferError, match=r"layer 0 has no self_attn.*; set solver=ridge or another closed form"):
        stage.calibrate(settings)


def test_what_a_later_stage_needs_is_asked_of_the_pair_too(
    tiny_pair: Pair, tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "accumulate", no_pass)
    given = toy_models(tiny_folders)

    def refused(stage_name: str, *asked: str) -> str:
        with pytest.raises(KvxferError) as error:
            refuse_unfit(settings_of(stage_name, tmp_path, *given, *asked), tiny_pair)
        return str(error.value)

    assert refused("train", "solver.k=3").startswith("solver.k=3 must be from 1 to 2")
    assert refused("evaluate", "eval.length=5000").startswith("eval.length: 5000 tokens")
    assert refused("evaluate", "eval=diagnostics", "eval.prefix=4090").startswith("eval.prefix and eval.scored: 4154")
    assert refused("evaluate", "eval=perplexity", "eval.prefixes=[64,5000]").startswith("eval.prefixes: 5064")
    assert refused("evaluate", "eval=multiturn", "eval.turns=300").startswith("eval.turns, eval.segment: 6000")
    assert refused("evaluate", "eval=latency", "eval.lengths=[128,5000]").startswith("eval.lengths: 5000")
    refuse_unfit(settings_of("evaluate", tmp_path, *given), tiny_pair)


def rows_of(ids: list[int]) -> dict[str, Rows]:
    return {"fit": Rows(torch.tensor([ids]), [("a",)], "text")}


def test_a_token_that_a_model_does_not_embed_is_named_before_the_pass(
    tiny_pair: Pair, tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = settings_of("calibrate", tmp_path, "pair=custom", *toy_models(tiny_folders)[:2])
    beyond = tiny_pair.source.geometry.vocabulary
    try_row(settings, tiny_pair, rows_of([1, 2, 3, 4, 5, beyond - 1]))
    with pytest.raises(KvxferError, match=rf"the text has token {beyond} .* the model embeds {beyond}"):
        try_row(settings, tiny_pair, rows_of([1, 2, 3, 4, 5, beyond]))
    with pytest.raises(KvxferError, match=f"the text has token {beyond}"):
        tiny_pair.target.prefill(torch.tensor([[1, beyond]]))


def test_a_target_that_does_not_go_on_from_its_own_cache_is_refused(
    tiny_pair: Pair, tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of("calibrate", tmp_path, "pair=custom", *toy_models(tiny_folders)[:2])
    monkeypatch.setattr(Pair, "rotated", lambda self, which, content: content.zeros())
    with pytest.raises(
        KvxferError, match="going on from its own cache, taken through content space, changes a token's"
    ):
        try_row(settings, tiny_pair, rows_of(list(range(3, 43))))
    monkeypatch.undo()
    try_row(settings, tiny_pair, rows_of(list(range(3, 43))))
    monkeypatch.setattr(LoadedModel, "_cache", lambda self, past: build_cache(past and past.zeros()))
    with pytest.raises(KvxferError, match="going on from its own cache changes a token's score"):
        try_row(settings, tiny_pair, rows_of(list(range(3, 43))))


def test_a_model_s_own_rounding_is_no_reason_to_refuse_it(
    tiny_pair: Pair, tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a reading in two parts gives other scores than one in one: a token's by 0.1 nats and more."""
    settings = settings_of("calibrate", tmp_path, "pair=custom", *toy_models(tiny_folders)[:2])
    tolerance = TOLERANCE[tiny_pair.target.dtype]
    real = dry_row.token_log_likelihoods

    def rounded(prepared: Prepared, answer: torch.Tensor) -> torch.Tensor:
        found = real(prepared, answer)
        return found if prepared.past is None else found + 3 * tolerance

    monkeypatch.setattr(dry_row, "token_log_likelihoods", rounded)
    try_row(settings, tiny_pair, rows_of(list(range(3, 43))))


def model_of(lm: Any) -> LoadedModel:
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, "x"), lm.config.model_type, "random")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_that_is_more_than_a_softmax_is_told_by_what_it_gives(dtype: torch.dtype) -> None:
    model_of(tiny_model("qwen3-yarn").to(dtype)).check_softmax("another")
    strange = DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE, num_key_value_heads=2, head_dim=16)).to(dtype)
    with pytest.raises(KvxferError, match=r"layer 0's attention is more than a softmax .*; set another$"):
        model_of(strange).check_softmax("another")


def test_a_projection_that_is_no_plain_matrix_is_refused() -> None:
    model = model_of(tiny_model("qwen3-default"))
    weight = model.body.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.to(torch.uint8)
    with pytest.raises(KvxferError, match=r"layer 1's o_proj is no plain matrix \(quantised\?\); set another$"):
        model.output_projections("another")
