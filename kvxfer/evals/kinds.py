"""The kinds of evaluation: one line each."""

from __future__ import annotations

from kvxfer.evals.benchmarks.benchmarks import Benchmarks
from kvxfer.evals.diagnostics import Diagnostics
from kvxfer.evals.evaluation import Evaluation
from kvxfer.evals.generation import Generation
from kvxfer.evals.latency.latency import Latency
from kvxfer.evals.multiturn import Multiturn
from kvxfer.evals.perplexity import Perplexity
from kvxfer.evals.questions import Questions

KINDS: dict[str, type[Evaluation]] = {
    kind.kind: kind for kind in (Questions, Perplexity, Diagnostics, Benchmarks, Generation, Multiturn, Latency)
}
"""By the ``kind`` that an option names."""
