"""Healing a pruned model: what is trained is what is written, and a killed run goes on with the same bits."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.hf.changes import Changes
from kvxfer.models.hf.pruning import prune_model
from kvxfer.text.corpus import document_key
from tests.doubles import tiny_model
from tools.healing import recipe as healing
from tools.healing.documents import documents, read_document, rows

RECIPE = healing.Recipe(dropped=(1,), steps=4, batch=2, length=8, rank=2, rate=1e-2, warm_up=1, checkpoint=2)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 300, (8, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    torch.manual_seed(1)
    lm = tiny_model("qwen3-default", num_hidden_layers=3)

    def load(dropped: tuple[int, ...] = ()) -> SimpleNamespace:
        model = copy.deepcopy(lm)
        prune_model(model, dropped, "pair.source")
        return SimpleNamespace(lm=model)

    monkeypatch.setattr(healing, "load", load)
    return lm


def divergence(lm: torch.nn.Module, whole: torch.nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        own, theirs = (model(tokens).logits.log_softmax(-1) for model in (lm, whole))
    return float((theirs.exp() * (theirs - own)).sum(-1).mean())


def test_what_is_written_is_the_model_that_was_trained(whole: torch.nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    found = healing.heal(replace(RECIPE, steps=30), tokens.repeat(8, 1), tmp_path / "kept")
    pruned, healed = (copy.deepcopy(whole) for _ in range(2))
    prune_model(pruned, (1,), "pair.source")
    Changes((1,), found).apply(healed, "pair.source")
    assert divergence(healed, whole, tokens) < 0.7 * divergence(pruned, whole, tokens)
    # Seven linear layers with two thin matrices, and four norms; two layers and the last norm.
    assert len(found) == 2 * (7 * 2 + 4) + 1


def test_the_loss_is_the_divergence_and_its_gradient(whole: torch.nn.Module, tokens: Tensor) -> None:
    student = healing.load((1,)).lm.requires_grad_(False)
    trained = healing.add_changes(student.base_model, 2)
    loss = healing.backward(student, whole, tokens)
    assert loss == pytest.approx(divergence(student, whole, tokens), rel=1e-4)
    found = trained["layers.0.mlp.up_proj.up"].grad.clone()
    own, theirs = (model(tokens).logits.log_softmax(-1) for model in (student, whole))
    plain = (theirs.detach().exp() * (theirs.detach() - own)).sum(-1).mean()
    (wanted,) = torch.autograd.grad(plain, [trained["layers.0.mlp.up_proj.up"]])
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-7)


def test_a_killed_run_goes_on_with_the_same_bits(
    whole: torch.nn.Module, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = healing.heal(RECIPE, tokens, tmp_path / "one")
    steps, plain = [], healing.backward

    def killed(*args: object) -> float:
        steps.append(0)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return plain(*args)

    with monkeypatch.context() as patched:
        patched.setattr(healing, "backward", killed)
        with pytest.raises(KeyboardInterrupt):
            healing.heal(RECIPE, tokens, tmp_path / "two")
    resumed = healing.heal(RECIPE, tokens, tmp_path / "two")
    assert all(torch.equal(value, resumed[name]) for name, value in at_once.items())
    with pytest.raises(SystemExit, match="is of another recipe"):
        healing.heal(replace(RECIPE, rank=3), tokens, tmp_path / "two")


def test_documents_are_read_once_and_their_keys_told(tmp_path: Path) -> None:
    body = "Some text, long enough to be a document. " * 20
    (tmp_path / "a.txt").write_text(body)
    (tmp_path / "copy.txt").write_text(f"  {body}\n")
    (tmp_path / "stub.py").write_text("x = 1\n")
    (tmp_path / "page.html").write_text(
        f"<html><head><title>no</title></head><body><p>{body}</p><pre>a\n b</pre></body>"
    )
    assert read_document(tmp_path / "page.html").splitlines() == [body.rstrip(), "a", " b"]
    found = dict(documents([tmp_path], 0))
    assert set(found) == {document_key(body), document_key(f"{body} a b")}

    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    tokenizer.eos_token_id = 0  # type: ignore[attr-defined]
    made, keys = rows(iter(found.items()), tokenizer, 10, 5, 1000)
    assert made.shape == (10, 5)
    assert keys == list(found)[:1]
    with pytest.raises(KvxferError, match="lower --steps"):
        rows(iter(found.items()), tokenizer, 1000, 5, 1000)
    with pytest.raises(KvxferError, match="give unpacked packages"):
        documents([tmp_path / "none"], 0)
