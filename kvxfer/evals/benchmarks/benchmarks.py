"""Published benchmarks through lm-evaluation-harness, answered on a mapped cache."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.evals.benchmarks.requests import Condition, Handover
from kvxfer.evals.benchmarks.rightness import check_rightness
from kvxfer.evals.benchmarks.scores import check_measures, gather
from kvxfer.evals.benchmarks.tasks import load_tasks, run_tasks, write_toy_tasks
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.specs import TOY_TASKS, BenchmarksSpec, harness_version
from kvxfer.maps.plan import Plan
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.pair import Pair
from kvxfer.text.spec import CorpusSpec

CONDITIONS: tuple[Condition, ...] = ("ceiling", "source", "mapped", "no_context", "floor", "raw_copy")
KIN: tuple[Condition, ...] = ("ancestor_copy",)
"""One more, for a pair whose source was pruned from its target."""


@dataclass(frozen=True)
class Benchmarks(BenchmarksSpec, Evaluation):
    """``eval=lm_eval``: what it measures."""

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        if published := [name for name in self.tasks if name not in TOY_TASKS]:
            tasks = load_tasks(published, [] if self.folder is None else [self.folder], self.num_fewshot, self.seed)
            check_rightness(tasks, self.limit)

    def measure(self, subject: Subject) -> dict[str, Any]:
        pair = subject.pair
        with tempfile.TemporaryDirectory(prefix="kvxfer-tasks-") as scratch:
            folders = [] if self.folder is None else [self.folder]
            if set(self.tasks) & set(TOY_TASKS):
                write_toy_tasks(Path(scratch), pair.tokenizer, subject.corpus.length)
                folders.append(Path(scratch))
            tasks = load_tasks(self.tasks, folders, self.num_fewshot, self.seed)
            check_rightness(tasks, self.limit)

            from kvxfer.evals.benchmarks.model import HarnessModel

            def answered(condition: Condition, limit: int | None) -> Mapping[str, Any]:
                handover = Handover(pair, subject.plan, condition, subject.mapper)
                return run_tasks(tasks, HarnessModel(handover, self.batch_size, self.seed), limit, self.seed)

            # What can't be asked or compared shows in one sample of every task, before hours of all of them.
            check_measures(tasks, answered("ceiling", 1))
            conditions = (*CONDITIONS, *(KIN if find_ancestry(pair) is not None else ()))
            logged: dict[str, Mapping[str, Any]] = {name: answered(name, self.limit) for name in conditions}
            found = gather(tasks, logged, self.log_samples)
        settings = {"limit": self.limit, "num_fewshot": self.num_fewshot, "batch_size": self.batch_size}
        return {
            "harness": harness_version(),
            "settings": {**settings, "seed": self.seed, "longest_context": pair.longest_context},
            **found,
            "library_warnings": tasks.warned,
        }
