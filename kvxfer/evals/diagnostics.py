"""Why a map does well or not: what its keys and values do inside the target, on its own text and on others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.fit_check import recorded_r2
from kvxfer.evals.inside_target import Diagnosis, Predictions, Ratios
from kvxfer.evals.specs import DiagnosticsSpec
from kvxfer.evals.statistics import paired_difference
from kvxfer.maps.blocks import KINDS
from kvxfer.progress import progress
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import CorpusSpec


@dataclass(frozen=True)
class Diagnostics(DiagnosticsSpec, Evaluation):
    """``eval=diagnostics``: what it measures."""

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
        subject.pair.check_length(prefix + self.scored, "eval.prefix and eval.scored")
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
        "kl_test": _kl_test(found.predictions, documents),
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


def _kl_test(predictions: dict[str, Predictions], documents: list[str]) -> dict[str, Any]:
    """Mapped minus source, in nats per token."""
    mapped, source = (np.array(predictions[name].kl) for name in ("mapped", "source"))
    test = paired_difference(mapped, source, documents, np.array(predictions["mapped"].tokens))
    return {"difference": test["difference"], "ci": [test["ci_low"], test["ci_high"]], "p": test["t_p"]}
