"""The toy questions as tasks of lm-evaluation-harness: JSON lines and YAML files that its own task manager reads.

``toy_choices`` scores every candidate answer and asks what ``eval=standard`` asks; ``toy_answers`` lets the model write
one and asks about other stories, so that the two may be counted together. All stories are of the evaluation split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.specs import TOY_TASKS
from kvxfer.text.corpus import toy_stories

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
            _check_words(f"{question['context']} {question['answer']} .", tokenizer)
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


def _check_words(text: str, tokenizer: Any) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != len(text.split()) or tokenizer.decode(ids) != text:
        raise KvxferError(
            f"eval.tasks={list(TOY_TASKS)} ask about the toy world, whose words the pair's tokenizer does not know one "
            "by one; name published tasks, as eval.tasks=[arc_easy]"
        )
