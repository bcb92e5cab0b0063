"""Tasks of lm-evaluation-harness: found, loaded, and run with one model at a time. Nothing else calls the harness.

The toy questions are written as two of them: JSON lines and YAML files that its own task manager reads. ``toy_choices``
scores every candidate answer and asks what ``eval=standard`` asks; ``toy_answers`` lets the model write one and asks
about other stories, so that the two may be counted together. All stories are of the evaluation split.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.squad import offered
from kvxfer.evals.specs import TOY_TASKS, harness_version
from kvxfer.models.remarks import Remarks, remarks
from kvxfer.text.corpus import toy_stories

SUPPORTED = ("multiple_choice", "loglikelihood", "generate_until")
PYTHON_SEED = 0
"""Of Python's own random numbers, which the harness seeds apart from all others."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks.

    Attributes:
        members: for every name that was asked for (a task, a group or a tag) the single tasks that it stands for.
        single: the single tasks by name.
        groups: what the harness keeps of groups, by name.
        warned: what the harness and datasets have warned of so far.
    """

    members: dict[str, list[str]]
    single: dict[str, Any]
    groups: dict[str, Any]
    warned: Remarks = field(default_factory=Remarks)


def load_tasks(names: Sequence[str], folders: Sequence[Path], num_fewshot: int | None, seed: int) -> Tasks:
    """Find and load tasks by name, first in ``folders``, then among those that come with the harness.

    Raises KvxferError for an unknown name, for data that is not there and can't be downloaded, and for a task of a
    kind that has no context to hand over or runs code of the model.
    """
    harness_version()
    members: dict[str, list[str]] = {}
    single: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    warned = Remarks()
    with _quiet(warned), offered():
        _seed_all(seed)
        manager = _manager(names, folders)
        for name in names:
            found = _load(manager, name)
            members[name] = list(found["tasks"])
            for member, task in found["tasks"].items():
                if member in single:
                    raise KvxferError(f"eval.tasks: {member} is asked twice, once by {name}; name it once")
                single[member] = task
            groups |= found["groups"]
        for member, task in single.items():
            _check(member, task)
            _set_shots(member, task, num_fewshot)
    return Tasks(members, single, groups, warned)


def _manager(names: Sequence[str], folders: Sequence[Path]) -> Any:
    from lm_eval.tasks import TaskManager

    # Reading the thousands of tasks that come with the harness takes a while: only if they are asked for.
    local = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    if set(names) <= set(local.all_tasks):
        return local
    manager = TaskManager(include_path=[str(folder) for folder in folders])
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        raise KvxferError(
            f"eval.tasks: {', '.join(unknown)}: no such task in lm-evaluation-harness {harness_version()}"
            + (f" or {', '.join(map(str, folders))}" if folders else "; eval.include_path=<folder> adds tasks")
        )
    return manager


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        return dict(manager.load([name]))
    except Exception as error:  # data sets and task files fail with almost any type
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KvxferError(f"eval.tasks: {name} can't be loaded ({reason}); {_advice(error)}") from error


def _advice(error: Exception) -> str:
    if isinstance(error, ImportError | SyntaxError):
        return "install what its code needs"
    # What is not there and what can't be reached; httpx alone has no OSError for it.
    if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "httpx":
        return "its file or its data is faulty: correct it"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    tried = "HF_HUB_OFFLINE is set: unset it to download" if offline else "check the network"
    return f"{tried}, or name tasks whose data is here, as toy_choices"


def _check(name: str, task: Any) -> None:
    kind = task.OUTPUT_TYPE
    if kind == "loglikelihood_rolling":
        raise KvxferError(
            f"eval.tasks: {name} scores whole texts, which have no context to hand over; use eval=perplexity, which "
            "scores what follows a prefix"
        )
    if kind not in SUPPORTED:
        raise KvxferError(f"eval.tasks: {name} is of kind {kind}; supported are {', '.join(SUPPORTED)}")
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise KvxferError(f"eval.tasks: {name} runs code that a model wrote, or shows it images; unsupported")


def _set_shots(name: str, task: Any, num_fewshot: int | None) -> None:
    """The harness's own rule: a task that sets 0 itself keeps it, one that sets nothing has 0."""
    own = task.get_config("num_fewshot")
    if num_fewshot is None or own == 0:
        task.set_config(key="num_fewshot", value=own or 0)
        return
    task.set_config(key="num_fewshot", value=num_fewshot)
    if not num_fewshot:
        return
    examples = len(task.fewshot_docs())
    if task.fewshot_cfg.split == task.config.test_split:
        examples -= 1  # the asked one is none of its own
    if num_fewshot > examples:
        raise KvxferError(f"eval.num_fewshot={num_fewshot}: {name} has {examples} examples to draw from; lower it")


def run_tasks(tasks: Tasks, model: Any, limit: int | None, seed: int) -> Mapping[str, Any]:
    """The harness's results with every sample, of one model. Whatever was run before, the requests are the same."""
    from lm_eval.evaluator import evaluate

    with _quiet(tasks.warned):
        _seed_all(seed)
        for task in tasks.single.values():
            task.set_fewshot_seed(seed=seed)
        loaded = {"tasks": tasks.single, "groups": tasks.groups}
        return dict(evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=True))


def _seed_all(seed: int) -> None:
    """What the harness seeds before it loads tasks and builds requests."""
    random.seed(PYTHON_SEED)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _quiet(warned: Remarks) -> Iterator[None]:
    """Without progress bars that no setting turns off; what the harness and datasets warn of is kept in ``warned``."""
    from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled
    from lm_eval.api import task as building

    bars, bar = is_progress_bar_enabled(), building.tqdm
    disable_progress_bars()
    building.tqdm = lambda documents, **_: documents
    try:
        with remarks("lm_eval", "datasets") as said:
            yield
    finally:
        building.tqdm = bar
        if bars:
            enable_progress_bars()
    for remark in said:
        warned.add(remark)


STORIES = {"toy_choices": 200, "toy_answers": 100}
QUESTIONS = 5
DRAW = {"toy_choices": 0, "toy_answers": 1}
"""Which draw of stories a task takes (``kvxfer.text.corpus.toy_stories``)."""
VERSION = 1
ANSWER_TOKENS = 3  # one or two words and the dot

_COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "num_fewshot": 0,
    "metadata": {"version": VERSION},
}
_TASKS: dict[str, dict[str, Any]] = {
    "toy_choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{choices.index(answer)}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "toy_answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [" ."], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_toy_tasks(folder: Path, tokenizer: Any, length: int) -> None:
    """Write the questions, about stories of ``length`` words, and the two tasks that ask them into ``folder``.

    The harness's copy of the data lies in the same folder. Raises KvxferError if stories can't be that long, or the
    tokenizer does not take the toy world's words one by one.
    """
    for name, task in _TASKS.items():
        questions = _questions(name, length)
        for question in questions:
            text = f"{question['context']} {question['answer']} ."
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) != len(text.split()) or tokenizer.decode(ids) != text:
                raise KvxferError(
                    f"eval.tasks={list(TOY_TASKS)} ask about the toy world, whose words the pair's tokenizer does not "
                    "know one by one; name published tasks, as eval.tasks=[arc_easy]"
                )
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
        files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        whole = {"task": name, **_COMMON, "dataset_kwargs": files, **task}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")


def _questions(name: str, length: int) -> list[dict[str, Any]]:
    try:
        stories = toy_stories("evaluation", STORIES[name], length, DRAW[name])
    except ValueError as error:
        raise KvxferError(f"eval.tasks={list(TOY_TASKS)}: corpus.length={length}: {error}") from error
    return [
        {
            "document": f"toy/{story.seed}",
            "kind": question.kind,
            "context": " ".join((*story.words, *question.prompt)),
            "choices": [" ".join(candidate) for candidate in question.candidates],
            "answer": " ".join(question.answer),
        }
        for story in stories
        for question in story.questions[:QUESTIONS]
    ]
