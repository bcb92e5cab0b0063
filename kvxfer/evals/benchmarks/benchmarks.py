"""Published benchmarks through lm-evaluation-harness, answered on a mapped cache."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.requests import Condition, Handover
from kvxfer.evals.benchmarks.scores import check_measures, gather
from kvxfer.evals.benchmarks.tasks import harness_version, load_tasks, run_tasks
from kvxfer.evals.benchmarks.toy_tasks import TOY_TASKS, write_toy_tasks
from kvxfer.evals.evaluation import Evaluation, Subject

CONDITIONS: tuple[Condition, ...] = ("ceiling", "source", "mapped", "floor")
_TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv")


@dataclass(frozen=True)
class Benchmarks(Evaluation):
    """``eval=lm_eval``: tasks by the harness's names, each under four conditions on the same requests.

    ``limit`` keeps the first samples of every task; ``num_fewshot`` overrides what tasks set, as the harness does;
    ``include_path`` is a folder of further tasks; ``seed`` draws few-shot examples and sampled answers.
    """

    kind = "lm_eval"

    tasks: tuple[str, ...] = TOY_TASKS
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    include_path: str | None = None
    log_samples: bool = True
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.tasks:
            raise KvxferError("eval.tasks is empty; name at least one task, as eval.tasks=[toy_choices]")
        twice = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        if twice:
            raise KvxferError(f"eval.tasks: {', '.join(twice)} is named twice; name every task once")
        self.at_least(limit=1, num_fewshot=0, batch_size=1, seed=0)
        if self.include_path is not None and not self._folders():
            raise KvxferError(f"eval.include_path: no folder {self.include_path!r}; give a folder with tasks as YAML")

    def _folders(self) -> list[Path]:
        folder = None if self.include_path is None else Path(self.include_path).expanduser()
        return [folder] if folder is not None and folder.is_dir() else []

    def identity(self) -> dict[str, Any]:
        """Own tasks count by their content, and the harness by its version."""
        fields = {**super().identity(), "harness": harness_version()}
        return fields | {"include_path": _digest(self._folders()[0]) if self.include_path else None}

    def measure(self, subject: Subject) -> dict[str, Any]:
        """All tasks under every condition."""
        pair = subject.pair
        with tempfile.TemporaryDirectory(prefix="kvxfer-tasks-") as scratch:
            folders = self._folders()
            if set(self.tasks) & set(TOY_TASKS):
                write_toy_tasks(Path(scratch), pair.tokenizer, subject.corpus.length)
                folders.append(Path(scratch))
            tasks = load_tasks(self.tasks, folders, self.num_fewshot, self.seed)

            from kvxfer.evals.benchmarks.model import HarnessModel

            def answered(condition: Condition, limit: int | None) -> Mapping[str, Any]:
                handover = Handover(pair, subject.plan, condition, subject.mapper)
                return run_tasks(tasks, HarnessModel(handover, self.batch_size, self.seed), limit, self.seed)

            # What can't be asked or compared shows in one sample of every task, before hours of all of them.
            check_measures(tasks, answered("ceiling", 1))
            logged: dict[str, Mapping[str, Any]] = {name: answered(name, self.limit) for name in CONDITIONS}
            found = gather(tasks, logged, self.log_samples)
        settings = {"limit": self.limit, "num_fewshot": self.num_fewshot, "batch_size": self.batch_size}
        return {
            "harness": harness_version(),
            "settings": {**settings, "seed": self.seed, "longest_context": pair.longest_context},
            **found,
        }


def _digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's task files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _TASK_FILES and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
