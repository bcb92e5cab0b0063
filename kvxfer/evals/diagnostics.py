"""Why a map does well or not: what its keys and values do inside the target, on its own text and on others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.fit_check import recorded_r2
from kvxfer.evals.inside_target import Diagnosis, Predictions, Ratios
from kvxfer.evals.statistics import paired_difference
from kvxfer.maps.blocks import KINDS
from kvxfer.progress import progress
from kvxfer.report.correlations import MEASURES, correlate
from kvxfer.report.diagnostics import FIGURES, correlation_table, domains_table, figures_of, layers_table
from kvxfer.report.tables import interval, number, p_text, percent
from kvxfer.report.verdict import Outcome, Verdict, outcome
from kvxfer.text.corpus import CorpusSpec, load_rows


@dataclass(frozen=True)
class Diagnostics(Evaluation):
    """``eval=diagnostics``: rows of ``prefix`` mapped tokens and the ``scored`` tokens after them.

    ``prefix`` is in tokens; None means the length of the rows that the map was calibrated on. A forward pass holds as
    many rows as ``batch_tokens`` tokens make up, and one at least.
    """

    kind = "diagnostics"
    heading = "Diagnostics"
    version = 2

    prefix: int | None = None
    scored: int = 64
    rows: int = 32
    domains: tuple[str, ...] = ()
    batch_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("scored", 1), ("rows", 2), ("batch_tokens", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be {least} or more")
        if self.prefix is not None and self.prefix < 2:
            raise KvxferError(f"eval.prefix={self.prefix} must be 2 tokens or more, or null")

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Every domain's diagnostics, and how those of all maps so far go with what the maps are worth."""
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
        asked = {**self.identity(), "prefix": prefix, **text, "plan": [first, prefix - stop]}
        del asked["domains"], asked["batch_tokens"]
        recorded = {f"{kind}.{layer}": value for (layer, kind), value in recorded_r2(subject.directory).items()}
        found = {"asked": asked, "domains": domains, "recorded_r2": recorded}
        measured = {name: own[name]["value"] for name in MEASURES}
        return {**found, "correlation": correlate(subject, asked, measured)}

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

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """Whose next-token predictions are nearer to the ceiling's on the run's own text: the mapped cache's, or the
        source's?"""
        own = data["domains"][0]
        test, ci = own["kl_test"], own["kl_test"]["ci"]
        result: Outcome = outcome(test["p"], test["difference"], ci, higher_is_better=False)
        head = {
            "better": "The mapped cache predicts the next token as the ceiling does more closely than the source does",
            "worse": "The mapped cache predicts the next token as the ceiling does less closely than the source does",
            "none": "It is not shown that the mapped cache predicts the next token more as the ceiling does than the "
            "source does",
        }[result]
        mapped, source = own["predictions"]["mapped"], own["predictions"]["source"]
        said = (
            f"{head}: KL {number(mapped['kl']['value'])} against {number(source['kl']['value'])} nats per token "
            f"({number(test['difference'], sign=True)}, 95 % interval {interval(ci, 'number')}, paired t "
            f"{p_text(test['p'])}), the same first choice in {percent(mapped['agreement']['value'])} against "
            f"{percent(source['agreement']['value'])}; attention outputs have a mean cosine of "
            f"{number(own['cosine']['value'])} with the true ones, the worst head's is "
            f"{number(own['worst_head']['cosine'])} (layer {own['worst_head']['layer']}, head "
            f"{own['worst_head']['head']})."
        )
        kinds: dict[Outcome, Any] = {"better": "beats", "worse": "worse", "none": "none"}
        return Verdict(kinds[result], head, said)

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """Means by domain, every layer of the run's own text, figures, and the correlations."""
        lines = [*domains_table(data), *layers_table(data)]
        for name, title in FIGURES.items():
            lines += [f"![{title}](figures/{name})", ""]
        return [*lines, *correlation_table(data["correlation"])]

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """The means by domain."""
        return {
            f"{domain['domain']}/{name}": domain[name]["value"]
            for domain in data["domains"]
            for name in MEASURES
            if domain[name]["value"] is not None
        }

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Cosine by layer and head, and R² by layer."""
        figures_of(data, folder)


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
