"""Whether a task's samples can be answered rightly at all. The harness warns, and scores 0."""

from __future__ import annotations

import itertools
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.tasks import Tasks
from kvxfer.evals.specs import harness_version


def check_rightness(tasks: Tasks, limit: int | None) -> None:
    """Refuse a task with a metric that nobody knows, or with a right answer that is none of its choices.

    Args:
        limit: how many first samples of every task are asked; None for all.
    """
    for name, task in tasks.single.items():
        # A task with code of its own for it scores as that says.
        if getattr(task.config, "process_results", None) is not None:
            continue
        unknown = [metric for metric, found in getattr(task, "_metric_fn_list", {}).items() if found is None]
        if unknown:
            raise KvxferError(
                f"eval.tasks: {name} is scored by {unknown[0]}, a metric that lm-evaluation-harness "
                f"{harness_version()} does not know; correct the task's metric_list"
            )
        if task.OUTPUT_TYPE == "multiple_choice" and hasattr(task, "multiple_input"):
            for number, document in enumerate(itertools.islice(task.eval_docs, limit)):
                _check_choices(name, task, number, document)


def _check_choices(name: str, task: Any, number: int, document: Any) -> None:
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    for each in gold if isinstance(gold, list | tuple) else [gold]:
        if not (0 <= each < len(choices) if isinstance(each, int) else each in choices):
            raise KvxferError(
                f"eval.tasks: the right answer of sample {number} of {name} is {each!r}, none of its {len(choices)} "
                "choices; correct doc_to_target or doc_to_choice of the task, or its data"
            )
