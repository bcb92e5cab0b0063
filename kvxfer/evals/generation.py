"""Free decoding (``eval=generation``): how much is right, how far it is the ceiling's, and where it parts from that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared, prefix_conditions
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.items import Item, equal_lengths, toy_items
from kvxfer.evals.specs import GenerationSpec
from kvxfer.evals.statistics import (
    COMPARISONS,
    NOTHING_HANDED,
    accuracy_interval,
    finite,
    mcnemar_exact,
    mean_interval,
    paired_difference,
)
from kvxfer.handoff.transfer import Transfer
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text.corpus import load_rows

CONDITIONS = ("ceiling", "source", "mapped", *NOTHING_HANDED)
"""Who decodes, where the pair has it. The ceiling comes first: the others are compared with what it writes."""


@dataclass(frozen=True)
class Decoded:
    """What was written under one condition, and how it compares with the ceiling.

    Attributes:
        tokens: the greedy continuation.
        samples: sampled ones.
        kl: KL divergence, in nats, of the next-token distribution from the ceiling's, along the ceiling's own greedy
            tokens: at every step both have read the same.
        top: whether the largest logit is the ceiling's token there.
    """

    tokens: Int64[np.ndarray, "items steps"]
    samples: Int64[np.ndarray, "items samples steps"]
    kl: Float[np.ndarray, "items steps"]
    top: Bool[np.ndarray, "items steps"]


def gumbel(seed: int, items: Sequence[Item], sample: int, steps: int, width: int) -> Float[Tensor, "items steps width"]:
    """Gumbel noise that depends on the seed, the item and the sample alone: every condition has the same luck."""
    rows = []
    for item in items:
        digest = hashlib.sha256(f"{seed}/{item.id}/{sample}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty(steps, width, dtype=torch.float64).exponential_(generator=generator)
        rows.append(-drawn.log().float())
    return torch.stack(rows)


@dataclass(frozen=True)
class Decoder:
    """How it is decoded: so many tokens, greedily and in so many samples at a temperature."""

    steps: int
    samples: int
    temperature: float
    seed: int

    @torch.inference_mode()
    def decode(
        self,
        transfer: Transfer,
        items: Sequence[Item],
        batch_size: int,
        advance: Callable[[int], None],
    ) -> dict[str, Decoded]:
        """Every item under every condition, in the order of ``items``."""
        order: list[int] = []
        parts: dict[str, list[Decoded]] = {}
        for chosen in equal_lengths(range(len(items)), batch_size, key=lambda n: len(items[n].prompt)):
            batch = [items[n] for n in chosen]
            for name, decoded in self._batch(transfer.pair, _prepared(transfer, batch), batch).items():
                parts.setdefault(name, []).append(decoded)
            order += chosen
            advance(len(chosen))
        back = np.argsort(np.array(order))
        fields = ("tokens", "samples", "kl", "top")
        return {
            name: Decoded(*(np.concatenate([getattr(part, field) for part in found])[back] for field in fields))
            for name, found in parts.items()
        }

    def _batch(self, pair: Pair, prepared: dict[str, Prepared], batch: Sequence[Item]) -> dict[str, Decoded]:
        widths = (pair.source.geometry.vocabulary, pair.target.geometry.vocabulary)
        greedy = {name: p.model.generate(p.tail, p.past, self.steps).cpu() for name, p in prepared.items()}
        sampled: dict[str, list[Tensor]] = {name: [] for name in prepared}
        for sample in range(self.samples):
            noise = self.temperature * gumbel(self.seed, batch, sample, self.steps, max(widths))

            def lucky(p: Prepared, noise: Tensor = noise) -> Tensor:
                width = p.model.geometry.vocabulary
                return p.model.generate(p.tail, p.past, self.steps, noise=lambda step: noise[:, step, :width]).cpu()

            for name, p in prepared.items():
                sampled[name].append(lucky(p))
        wanted = greedy["ceiling"]
        ceiling = _log_probabilities(prepared["ceiling"], wanted, min(widths))
        found = {}
        for name, p in prepared.items():
            own = ceiling if name == "ceiling" else _log_probabilities(p, wanted, min(widths))
            kl = (ceiling.exp() * (ceiling - own)).sum(-1).clamp_min(0)
            drawn = torch.stack(sampled[name], dim=1) if self.samples else torch.zeros(len(batch), 0, self.steps).long()
            top = own.argmax(-1).cpu() == wanted
            found[name] = Decoded(greedy[name].numpy(), drawn.numpy(), kl.cpu().double().numpy(), top.numpy())
        return found


def _prepared(transfer: Transfer, batch: Sequence[Item]) -> dict[str, Prepared]:
    """Caches of the prompts less the held-back tokens, also where a model has them of its own: all decode from them."""
    found = prefix_conditions(transfer, torch.tensor([item.prompt for item in batch]))
    return {name: found[name] for name in CONDITIONS if name in found}


def _log_probabilities(
    prepared: Prepared, tokens: Int64[Tensor, "batch steps"], width: int
) -> Float[Tensor, "batch steps width"]:
    """What the condition says of each token, having read those before it; of the words that both models have."""
    ids = torch.cat([prepared.tail, tokens[:, :-1]], dim=1)
    logits = prepared.model.logits(ids, prepared.past, tokens.shape[1])[..., :width]
    return torch.log_softmax(logits, dim=-1)


DRAWN = ("source", "mapped", "floor")
"""Of which it is kept how they do step by step."""

PER_ITEM = ("agreement", "agreement_sampled", "kl", "top", "exact_sampled", "never_sampled")


def summarise_decoding(items: Sequence[Item], decoded: dict[str, Decoded], dot: int | None) -> dict[str, Any]:
    """The ``conditions``, ``tests``, ``steps`` and ``items`` of the results.

    Args:
        dot: the token that ends an answer; None where there are no answers.
    """
    documents = [item.document for item in items]
    scores = {name: _Scores(items, found, decoded["ceiling"], dot) for name, found in decoded.items()}
    return {
        "answers": dot is not None,
        "conditions": {name: _condition(found, documents) for name, found in scores.items()},
        "tests": {
            f"{first}_vs_{second}": _test(scores[first], scores[second], documents)
            for first, second in COMPARISONS
            if first in scores and second in scores
        },
        "steps": {name: _steps(scores[name], documents) for name in DRAWN},
        "items": [
            {
                "id": item.id,
                "document": item.document,
                "kind": item.kind,
                **{
                    key: {name: found.of_item(key, n) for name, found in scores.items()} for key in ("exact", *PER_ITEM)
                },
                # The first place, from 1 on, that is not the ceiling's.
                "parts": {
                    name: None if found.match[n].all() else int(np.argmin(found.match[n])) + 1
                    for name, found in scores.items()
                },
            }
            for n, item in enumerate(items)
        ],
    }


class _Scores:
    """One condition's arrays: ``match`` [items, steps] is where its token is the ceiling's; the rest is per item."""

    def __init__(self, items: Sequence[Item], own: Decoded, ceiling: Decoded, dot: int | None) -> None:
        self.match: Bool[np.ndarray, "items steps"] = own.tokens == ceiling.tokens
        self.match_sampled: Bool[np.ndarray, "items samples steps"] = own.samples == ceiling.samples
        self.kl_steps = own.kl
        sampled = own.samples.shape[1] > 0
        self.columns: dict[str, Float[np.ndarray, " items"] | None] = {
            "agreement": self.match.mean(1),
            "agreement_sampled": self.match_sampled.mean((1, 2)) if sampled else None,
            "kl": own.kl.mean(1),
            "top": own.top.mean(1),
            "never_sampled": self.match_sampled.all(2).mean(1) if sampled else None,
            "exact_sampled": None,
        }
        self.exact: Bool[np.ndarray, " items"] | None = None
        if dot is not None:
            self.exact = np.array([_is(row, item, dot) for row, item in zip(own.tokens, items, strict=True)])
            if sampled:
                right = [[_is(row, item, dot) for row in rows] for rows, item in zip(own.samples, items, strict=True)]
                self.columns["exact_sampled"] = np.array(right, dtype=np.float64).mean(1)

    def of_item(self, key: str, n: int) -> bool | float | None:
        """One item's number."""
        if key == "exact":
            return None if self.exact is None else bool(self.exact[n])
        column = self.columns[key]
        return None if column is None else float(column[n])


def _is(tokens: Int64[np.ndarray, " steps"], item: Item, dot: int) -> bool:
    """Whether what is written is the answer and its dot."""
    wanted = (*item.answer, dot)
    return tuple(tokens[: len(wanted)].tolist()) == wanted


def _median(match: Bool[np.ndarray, "*rows steps"]) -> float | None:
    """The median of where rows part from the ceiling; None if it is beyond the last step."""
    rows = match.reshape(-1, match.shape[-1])
    places = np.where(rows.all(1), np.inf, np.argmin(rows, axis=1) + 1)
    found = float(np.median(places))
    return found if np.isfinite(found) else None


def _condition(scores: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"exact": None, "exact_ci": None}
    if scores.exact is not None:
        row = {"exact": float(scores.exact.mean()), "exact_ci": list(accuracy_interval(scores.exact, documents))}
    for key in PER_ITEM:
        column = scores.columns[key]
        row[key] = None if column is None else float(column.mean())
        row[f"{key}_ci"] = None if column is None else list(mean_interval(column, documents))
    never: Bool[np.ndarray, " items"] = np.all(scores.match, axis=1)
    row |= {"never": float(never.mean()), "never_ci": list(accuracy_interval(never, documents))}
    sampled = scores.match_sampled.shape[1] > 0
    return {**row, "parts": _median(scores.match), "parts_sampled": _median(scores.match_sampled) if sampled else None}


def _test(first: _Scores, second: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    """First minus second: exact McNemar for exact match, paired t over documents and bootstrap for the rest."""
    row: dict[str, Any] = dict.fromkeys(f"exact_{each}" for each in ("p", "difference", "ci", "se"))
    if first.exact is not None and second.exact is not None:
        paired = paired_difference(first.exact, second.exact, documents)
        row = {
            "exact_p": mcnemar_exact(first.exact, second.exact, documents),
            "exact_difference": paired["difference"],
            "exact_ci": [paired["ci_low"], paired["ci_high"]],
            "exact_se": finite(paired["se"]),
        }
    for key in PER_ITEM:
        a, b = first.columns[key], second.columns[key]
        found = None if a is None or b is None else paired_difference(a, b, documents)
        row[f"{key}_difference"] = None if found is None else found["difference"]
        row[f"{key}_p"] = None if found is None else found["t_p"]
        row[f"{key}_ci"] = None if found is None else [found["ci_low"], found["ci_high"]]
        if key == "kl" and found is not None:
            row |= {"kl_se": finite(found["se"]), "kl_sign_p": found["sign_p"], "kl_above": found["above"]}
    return {**row, "n": len(documents), "documents": len(set(documents))}


def _steps(scores: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    """Means over items at every step, with intervals."""
    columns: dict[str, Float[np.ndarray, "items steps"]] = {
        "agreement": scores.match.astype(np.float64),
        "kl": scores.kl_steps,
        "same_greedy": np.cumprod(scores.match, axis=1).astype(np.float64),
    }
    if scores.match_sampled.shape[1]:
        columns["same_sampled"] = np.cumprod(scores.match_sampled, axis=2).mean(1)
    row: dict[str, Any] = {}
    for key, values in columns.items():
        row[key] = values.mean(0).tolist()
        row[f"{key}_ci"] = [list(mean_interval(column, documents)) for column in values.T]
    return row


EXAMPLES = 3
"""Prompts, spread over all, of which it is kept what each condition writes greedily."""


@dataclass(frozen=True)
class Generation(GenerationSpec, Evaluation):
    """``eval=generation``: what it measures."""

    def measure(self, subject: Subject) -> dict[str, Any]:
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        items = self._items(subject, toy)
        longest = max(len(item.answer) for item in items) + 1
        if toy and self.new_tokens < longest:
            raise KvxferError(f"eval.new_tokens={self.new_tokens} must be {longest} or more: an answer and its dot")
        pair.check_length(max(len(item.prompt) for item in items) + self.new_tokens, "eval.new_tokens")
        decoder = Decoder(self.new_tokens, self.samples, self.temperature, self.seed)
        with progress(f"generation {pair.name}", len(items), "prompts") as advance:
            decoded = decoder.decode(subject.transfer, items, self.batch_size, advance)
        dot = pair.tokenizer.convert_tokens_to_ids(".") if toy else None
        setting = {key: getattr(self, key) for key in ("new_tokens", "samples", "temperature")}
        read = pair.tokenizer.decode
        examples = []
        for n in sorted({n * len(items) // EXAMPLES for n in range(EXAMPLES)}):
            written = {name: read(found.tokens[n].tolist()) for name, found in decoded.items()}
            examples.append({"id": items[n].id, "prompt": read(list(items[n].prompt[-8:])), **written})
        return {**setting, "prompts": len(items), **summarise_decoding(items, decoded, dot), "examples": examples}

    def _items(self, subject: Subject, toy: bool) -> list[Item]:
        corpus, tokenizer = subject.corpus, subject.pair.tokenizer
        if toy:
            return toy_items(tokenizer, corpus.length, self.stories, self.questions, self.seed)
        prefix = corpus.length // 2 if self.prefix is None else self.prefix
        rows = load_rows(corpus, tokenizer, "evaluation", self.rows, prefix)
        named = enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True))
        return [Item(str(n), documents[0], rows.domain, tuple(row), prefix, ()) for n, (row, documents) in named]
