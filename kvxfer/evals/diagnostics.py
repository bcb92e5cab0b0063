"""Why a map does well or not: what its keys and values do inside the target, on its own text and on others.

All of a domain's rows are gone through in batches; every quantity is kept as sums of each row, so that intervals can
resample documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import unmapped, without_context
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.fit_check import recorded_r2
from kvxfer.evals.specs import DiagnosticsSpec
from kvxfer.evals.statistics import (
    COMPARISONS,
    Interval,
    mean_interval,
    mean_ratio_interval,
    nats_test,
    paired_difference,
)
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.blocks import KINDS
from kvxfer.maps.content_errors import MappedErrors
from kvxfer.maps.plan import Plan
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import CorpusSpec

_Rows = Float[np.ndarray, "rows columns"]


@dataclass
class Ratios:
    """Ratios of sums, one per column (layer and head); means are kept as ratios to counts."""

    above: list[Float[Tensor, "rows columns"]] = field(default_factory=list)
    below: list[Float[Tensor, "rows columns"]] = field(default_factory=list)

    def add(self, above: Float[Tensor, "rows columns"], below: Float[Tensor, "rows columns"]) -> None:
        """Add rows."""
        self.above.append(above.double().cpu())
        self.below.append(below.double().cpu())

    def arrays(self) -> tuple[_Rows, _Rows]:
        """All rows."""
        return torch.cat(self.above).numpy(), torch.cat(self.below).numpy()

    def values(self) -> list[float | None]:
        """One ratio per column; None where there is nothing to divide by."""
        above, below = (each.sum(0) for each in self.arrays())
        return [float(a / b) if b > 0 and np.isfinite(a) else None for a, b in zip(above, below, strict=True)]

    def mean(self) -> float | None:
        """The mean over columns; None if one has no value."""
        found = self.values()
        return None if None in found else float(np.mean([value for value in found if value is not None]))

    def interval(self, documents: list[str]) -> Interval | None:
        """Its 95 % interval, bootstrap over documents."""
        above, below = self.arrays()
        return mean_ratio_interval(above, below, documents) if np.isfinite(above).all() else None

    @staticmethod
    def joined(parts: list[Ratios]) -> Ratios:
        """The columns of several, side by side."""
        arrays = [part.arrays() for part in parts]
        above, below = (torch.from_numpy(np.concatenate(each, axis=1)) for each in zip(*arrays, strict=True))
        return Ratios([above], [below])


@dataclass
class Predictions:
    """Nats of KL(ceiling ‖ other), and how often both put the same token first: sums over the scored tokens of rows."""

    kl: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, ceiling: Float[Tensor, "rows tokens vocab"], other: Float[Tensor, "rows tokens vocab"]) -> None:
        """Add the logits of the same positions of some rows."""
        for mine, theirs in zip(ceiling, other, strict=True):
            # In float64 and row by row: a vocabulary is large, and what agrees is a sum that nearly cancels.
            p, q = (torch.log_softmax(each.double(), dim=-1) for each in (mine, theirs))
            self.kl.append(float((p.exp() * (p - q)).sum()))
            self.agreed.append(int((mine.argmax(-1) == theirs.argmax(-1)).sum()))
            self.tokens.append(mine.shape[0])

    def summary(self, documents: list[str]) -> dict[str, dict[str, object]]:
        """``kl`` (nats per token) and ``agreement`` (a share), each with its interval over documents."""
        counts = np.array(self.tokens)
        if not np.isfinite(self.kl).all():
            raise KvxferError("eval: predictions on the mapped cache are not finite numbers; check the map and dtype")
        found: dict[str, dict[str, object]] = {}
        for name, sums in (("kl", np.array(self.kl)), ("agreement", np.array(self.agreed))):
            found[name] = {
                "value": float(sums.sum() / counts.sum()),
                "ci": list(mean_interval(sums, documents, counts)),
            }
        return found


def attend(
    queries: Float[Tensor, "rows heads new dim"],
    keys: Float[Tensor, "rows kv_heads tokens dim"],
    values: Float[Tensor, "rows kv_heads tokens dim"],
    scale: float,
) -> tuple[Float[Tensor, "rows heads new tokens"], Float[Tensor, "rows heads new dim"]]:
    """The attention of the last tokens' queries (rotated, as the keys): its probabilities, and each head's output.

    Query heads are grouped over their KV head; a token sees itself and what came before.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    new, tokens = queries.shape[2], keys.shape[2]
    scores = scale * torch.einsum("bhgnd,bhtd->bhgnt", grouped, keys)
    position = torch.arange(tokens - new, tokens, device=keys.device)
    later = torch.arange(tokens, device=keys.device) > position[:, None]
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    return weights.flatten(1, 2), torch.einsum("bhgnt,bhtd->bhgnd", weights, values).flatten(1, 2)


class Diagnosis:
    """Everything that is measured of one domain.

    Attributes:
        content: the errors of each target layer and kind over the mapped tokens, in content space.
        heads: by layer, the cosine of every query head's attention output, before W_O.
        outputs: by layer, that of the whole attention's output, after W_O.
        keys: by layer and KV head, K-concentration: the mean squared error of a query's score over what it would be if
            the key's error lay evenly in all directions.
        values: by layer and query head, V-concentration: the value's squared error weighted by squared attention, over
            its plain mean.
        predictions: of the mapped cache, of the source and of what costs no map, against the ceiling, over the words
            that both models have.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, target = transfer, transfer.pair.target
        layers = target.geometry.layers
        self.content = MappedErrors(layers)
        self.heads, self.outputs, self.keys, self.values = ([Ratios() for _ in range(layers)] for _ in range(4))
        self.predictions: dict[str, Predictions] = {}
        self._output = target.attention_outputs(_INSTEAD)

    @torch.inference_mode()
    def add(self, prompt: Int64[Tensor, "rows prompt"], answer: Int64[Tensor, "rows scored"]) -> None:
        """Add rows: the prompt's mapped tokens, and the text after them, whose queries meet the mapped cache."""
        pair, (first, stop) = self.transfer.pair, self.transfer.plan.mapped_span(prompt.shape[1])
        ids = torch.cat([prompt, answer], dim=1)[:, :-1]  # what follows the last token is not scored
        head, tail = ids[:, :stop], ids[:, stop:]
        true, queries = pair.target.queries(ids)
        read = self.transfer.prefill(head)
        content = self.transfer.content(read, head)
        self.content.add(pair.content("target", true.span(0, stop)), content, first, stop)
        handed = self.transfer.handed(read, head, true.span(0, first) if first else None)
        cache = true.starting_with(handed)
        for layer, each in enumerate(queries):
            self._add_layer(layer, each[:, :, stop:].float(), true, cache, first, stop)
        scored, (source, target) = answer.shape[1], (pair.source, pair.target)
        # The words that both models have: one vocabulary may be padded further than the other.
        width = min(source.geometry.vocabulary, target.geometry.vocabulary)
        ceiling = target.logits(tail, true.span(0, stop))[:, -scored:, :width]
        bare = without_context(pair, prompt, tail)
        own = true.span(0, first)
        found = {
            "mapped": (target, handed, tail),
            "source": (source, read, tail),
            "no_context": (target, None, bare.tail),
        }
        for name, cache in unmapped(pair, true.span(0, stop), read, own).items():
            found[name] = (target, cache, tail)
        for name, (model, past, rest) in found.items():
            other = model.logits(rest, past)[:, -scored:, :width]
            self.predictions.setdefault(name, Predictions()).add(ceiling, other)

    def _add_layer(
        self, layer: int, queries: Float[Tensor, "rows heads new dim"], true: KV, cache: KV, first: int, stop: int
    ) -> None:
        projection, scale = self._output[layer]
        (keys, values), (keys_, values_) = ((kv.keys[layer].float(), kv.values[layer].float()) for kv in (true, cache))
        weights, best = attend(queries, keys, values, scale)
        _, found = attend(queries, keys_, values_, scale)
        rows, heads, new = best.shape[:3]
        counts = torch.full((rows, heads), float(new))
        self.heads[layer].add(cosine_similarity(found, best, dim=-1).sum(2), counts)
        mine, theirs = (out.transpose(1, 2).flatten(2) @ projection.float().T for out in (found, best))
        self.outputs[layer].add(cosine_similarity(mine, theirs, dim=-1).sum(1, keepdim=True), counts[:, :1])

        error = (keys_ - keys)[:, :, first:stop].double()
        grouped = queries.double().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        looks, lies = (each.mT @ each for each in (grouped, error))
        traces = [each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (looks, lies)]
        self.keys[layer].add((looks * lies).sum((2, 3)), traces[0] * traces[1] / keys.shape[-1])

        squared = (values_ - values)[:, :, first:stop].double().square().sum(-1)
        squared = squared.repeat_interleave(heads // keys.shape[1], dim=1)
        looked = weights[..., first:stop].double().square().sum(2)
        self.values[layer].add((looked * squared).sum(-1), looked.sum(-1) * squared.mean(-1))


_INSTEAD = "eval=perplexity, which does without"


@dataclass(frozen=True)
class Diagnostics(DiagnosticsSpec, Evaluation):
    """``eval=diagnostics``: what it measures."""

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        pair.check_length((self.prefix or corpus.length) + self.scored, "eval.prefix and eval.scored")
        pair.target.check_softmax(_INSTEAD)

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Every domain's diagnostics, and what they are of (``asked``), by which those of other maps are like them."""
        prefix = self.prefix or subject.calibrated_length
        if prefix is None:
            raise KvxferError(
                "eval.prefix=null, and nothing beside the map says how long the rows are that it was calibrated on: "
                "give a length, as eval.prefix=128"
            )
        first, stop = subject.plan.mapped_span(prefix)
        if stop <= first:
            raise KvxferError(f"eval.prefix={prefix} leaves no token to map between the plan's exact ones; raise it")
        self.check(subject.pair, replace(subject.corpus, length=prefix), subject.plan)
        domains = [self._domain(subject, corpus, prefix) for corpus in subject.texts]
        own = domains[0]
        # By content: other seeds, paths and subsets of a corpus have its name too.
        text = {"text": own["domain"], "sha256": own["sha256"]}
        asked: dict[str, Any] = {"version": self.version, "scored": self.scored, "rows": self.rows, "seed": self.seed}
        asked |= {"prefix": prefix, **text, "plan": [first, prefix - stop]}
        recorded = {f"{kind}.{layer}": value for (layer, kind), value in recorded_r2(subject.directory).items()}
        return {"asked": asked, "domains": domains, "recorded_r2": recorded}

    def _domain(self, subject: Subject, corpus: CorpusSpec, prefix: int) -> dict[str, Any]:
        drawn, length = replace(corpus, seed=corpus.seed + self.seed), prefix + self.scored
        rows = load_rows(drawn, subject.pair.tokenizer, "evaluation", self.rows, length, fewer=True)
        if len(rows) < 2:
            raise KvxferError(
                f"eval.prefix={prefix}: {corpus.name} has {len(rows)} rows of {length} tokens for evaluation and 2 are "
                "needed; lower eval.prefix or eval.scored"
            )
        found = Diagnosis(subject.transfer)
        step = max(1, self.batch_tokens // length)
        with progress(f"diagnostics {corpus.name}", len(rows), "rows") as advance:
            for start in range(0, len(rows), step):
                part = rows.tokens[start : start + step]
                found.add(part[:, :prefix], part[:, prefix:])
                advance(len(part))
        documents = [keys[-1] for keys in rows.documents]
        about = {"domain": corpus.name, "rows": len(rows), "documents": len(set(documents)), "sha256": rows.digest}
        return {**about, **_summary(found, documents)}


def _mean(ratios: Ratios, documents: list[str], one_minus: bool = False) -> dict[str, Any]:
    """The mean over columns with its interval; R² is one minus such a ratio."""
    value, ci = ratios.mean(), ratios.interval(documents)
    if one_minus:
        return {"value": None if value is None else 1 - value, "ci": None if ci is None else [1 - ci[1], 1 - ci[0]]}
    return {"value": value, "ci": None if ci is None else list(ci)}


def _summary(found: Diagnosis, documents: list[str]) -> dict[str, Any]:
    layers = len(found.heads)
    r2: dict[str, Any] = {}
    for kind in KINDS:
        each = [found.content.by_output[layer, kind] for layer in range(layers)]
        parts = [Ratios([error], [deviation]) for error, deviation in (errors.sums() for errors in each)]
        r2[f"r2_{kind}"] = _mean(Ratios.joined(parts), documents, one_minus=True)
        r2[f"r2_{kind}_layers"] = [_finite(errors.r2()) for errors in each]
    predictions = {name: each.summary(documents) for name, each in found.predictions.items()}
    grid = [heads.values() for heads in found.heads]
    return {
        **r2,
        "cosine": _mean(Ratios.joined(found.heads), documents),
        "cosine_heads": grid,
        "cosine_output": _mean(Ratios.joined(found.outputs), documents),
        "cosine_output_layers": [output.values()[0] for output in found.outputs],
        "worst_head": _worst(grid),
        "concentration_keys": _mean(Ratios.joined(found.keys), documents),
        "concentration_keys_layers": [ratios.mean() for ratios in found.keys],
        "concentration_values": _mean(Ratios.joined(found.values), documents),
        "concentration_values_layers": [ratios.mean() for ratios in found.values],
        "kl": predictions["mapped"]["kl"],
        "agreement": predictions["mapped"]["agreement"],
        "predictions": predictions,
        "tests": _tests(found.predictions, documents),
        "items": [
            {"document": document, "kl": {name: each.kl[n] for name, each in found.predictions.items()}}
            for n, document in enumerate(documents)
        ],
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _worst(grid: list[list[float | None]]) -> dict[str, Any]:
    values = np.array([[np.nan if value is None else value for value in row] for row in grid])
    layer, head = np.unravel_index(np.nanargmin(values), values.shape)
    return {"layer": int(layer), "head": int(head), "cosine": float(values[layer, head])}


def _tests(predictions: dict[str, Predictions], documents: list[str]) -> dict[str, Any]:
    """First minus second in nats of KL from the ceiling per token, under the keys that nats have elsewhere."""
    found = {}
    for first, second in COMPARISONS:
        if first in predictions and second in predictions:
            own, other = (np.array(predictions[name].kl) for name in (first, second))
            paired = paired_difference(own, other, documents, np.array(predictions[first].tokens))
            found[f"{first}_vs_{second}"] = nats_test(paired)
    return found
