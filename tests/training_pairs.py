"""Pairs of tiny models in memory, and rows of them, for tests of training."""

from __future__ import annotations

import torch
from torch import Tensor

from kvxfer.fitting.trained.activations import Activations, ActivationStore
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.models.spec import ModelSpec, PairSpec
from tests.doubles import tiny_model, tiny_tokenizer


def pair_of(family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Pair:
    """Two models of a family (``tests.doubles``) of 2 layers, 4 query heads over 2 KV heads of 16."""
    sides = []
    for seed in (0, 1):
        lm = tiny_model(family, seed, attn_implementation=attention).to(dtype)
        sides.append(LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, f"random{seed}"))
    models = [ModelSpec(f"{family}-{seed}") for seed in (0, 1)]
    return Pair(PairSpec(family, *models, dtype=str(dtype).removeprefix("torch.")), *sides, "none")


def rows_of(rows: int = 3, tokens: int = 24, seed: int = 0) -> Tensor:
    """Token ids that every tiny model knows."""
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def activations(pair: Pair, rows: int = 3, tokens: int = 24) -> Activations:
    """What a pair makes of rows, logits included."""
    store = ActivationStore(pair, set(), rows_of(rows, tokens), 0.0, logits=True)
    return store.batch(range(rows))


def true_content(batch: Activations) -> KV:
    """The target's own content, as leaves."""
    return KV(batch.keys, batch.values).apply(lambda x: x.clone().requires_grad_())


def disturbed(batch: Activations, size: float = 0.3, seed: int = 0) -> KV:
    """The target's own content with noise, as leaves."""
    rng = torch.Generator().manual_seed(seed)
    content = KV(batch.keys, batch.values)
    return content.apply(lambda x: (x + size * x.std() * torch.randn(x.shape, generator=rng)).requires_grad_())
