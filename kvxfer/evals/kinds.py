"""The kinds of evaluation beside ``items``: one line each."""

from __future__ import annotations

from kvxfer.evals.base import Evaluation
from kvxfer.evals.latency import Latency
from kvxfer.evals.perplexity import Perplexity

KINDS: dict[str, type[Evaluation]] = {kind.kind: kind for kind in (Latency, Perplexity)}
"""By the ``kind`` that an option names."""
