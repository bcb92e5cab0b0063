"""The reports of all kinds of evaluation: one line each."""

from __future__ import annotations

from kvxfer.report.benchmarks import BenchmarksReport
from kvxfer.report.diagnostics import DiagnosticsReport
from kvxfer.report.generation import GenerationReport
from kvxfer.report.kind_report import KindReport
from kvxfer.report.latency import LatencyReport
from kvxfer.report.multiturn import MultiturnReport
from kvxfer.report.perplexity import PerplexityReport
from kvxfer.report.questions import QuestionsReport

REPORTS: dict[str, KindReport] = {
    "items": QuestionsReport(),
    "perplexity": PerplexityReport(),
    "diagnostics": DiagnosticsReport(),
    "lm_eval": BenchmarksReport(),
    "generation": GenerationReport(),
    "multiturn": MultiturnReport(),
    "latency": LatencyReport(),
}
"""By the ``kind`` of results.json."""
