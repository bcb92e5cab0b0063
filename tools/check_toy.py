"""Measures the toy models against the bar they must meet: ``python -m tools.check_toy`` (exit status 1 if they don't).

A question is answered by choosing among its candidates the one with the highest summed log-likelihood.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from kvxfer.toy import SOURCE_DIR, TARGET_DIR
from kvxfer.toy.world import BOS, DOT, KINDS, MAX_TURNS, SEP, Question, make_story

QUESTIONS = 1000
SHORT, FULL = "short", "full"
LENGTHS = {SHORT: range(64, 129), FULL: range(490, 511)}
FIRST_SEED = {SHORT: 10_000_000, FULL: 20_000_000}
TARGET_AT_LEAST, GAP_AT_LEAST, WITHOUT_STORY_AT_MOST = 0.93, 0.15, 0.05
ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Asked:
    """A question, the words that come before its prompt, and whether they hold the story and earlier turns."""

    before: tuple[str, ...]
    question: Question


@dataclass(frozen=True)
class Score:
    """The share of questions answered right, in all and per kind; greedily: every answer word and the dot after it."""

    choice: float
    greedy: float
    by_kind: dict[str, float]


def draw_questions(length: str, count: int, turns_before: int = 0) -> list[Asked]:
    """Questions on held-out stories, each right after its story or after this many answered turns."""
    asked: list[Asked] = []
    lengths, seed = LENGTHS[length], FIRST_SEED[length]
    while len(asked) < count:
        story = make_story(seed, lengths[seed % len(lengths)])
        seed += 1
        if turns_before:
            asked += _after_turns(story.words, story.questions, turns_before)
        else:
            asked += [Asked(story.words, question) for question in story.questions]
    return asked[:count]


def _after_turns(words: tuple[str, ...], questions: Sequence[Question], turns: int) -> list[Asked]:
    """The story's question that comes after so many others, if it has as many."""
    if len(questions) <= turns:
        return []
    answered = [word for q in questions[:turns] for word in (*q.prompt, *q.answer, DOT)]
    return [Asked((*words, *answered), questions[turns])]


def without_story(asked: Sequence[Asked]) -> list[Asked]:
    """The same questions with nothing before them."""
    return [Asked((BOS, SEP), one.question) for one in asked]


def guess_level(asked: Sequence[Asked]) -> float:
    """What guessing among the candidates gets right."""
    return sum(1 / len(one.question.candidates) for one in asked) / len(asked)


@torch.inference_mode()
def log_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, ...]], last: int
) -> Float[Tensor, "rows last vocab"]:
    """What the model says of the last words of each row, these coming one after the other."""
    logs = torch.empty(len(rows), last, len(tokenizer))
    # rows of one length go together, so that nothing is padded
    of_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        of_length[len(row)].append(index)
    for members in of_length.values():
        for first in range(0, len(members), ROWS_AT_ONCE):
            chunk = members[first : first + ROWS_AT_ONCE]
            ids: Int[Tensor, "rows tokens"] = torch.tensor(tokenizer([" ".join(rows[i]) for i in chunk])["input_ids"])
            logits = model(ids[:, :-1], logits_to_keep=last, use_cache=False).logits
            logs[chunk] = logits.float().log_softmax(-1)
    return logs


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked]) -> Score:
    """Ask every question: choose among its candidates, and look whether the answer would be written greedily."""
    hits: dict[str, list[bool]] = defaultdict(list)
    greedy = 0
    for size in {len(one.question.answer) for one in asked}:
        group = [one for one in asked if len(one.question.answer) == size]
        answered = [(*one.before, *one.question.prompt, *one.question.answer, DOT) for one in group]
        logs = log_probabilities(model, tokenizer, answered, size + 1)
        for row, one in zip(logs, group, strict=True):
            wanted = tokenizer.convert_tokens_to_ids([*one.question.answer, DOT])
            greedy += row.argmax(-1).tolist() == wanted
        likelihoods = _of_candidates(model, tokenizer, group, logs[:, 0])
        for one, values in zip(group, likelihoods, strict=True):
            chosen = one.question.candidates[values.index(max(values))]
            hits[one.question.kind].append(chosen == one.question.answer)
    by_kind = {kind: sum(hits[kind]) / len(hits[kind]) for kind in KINDS if kind in hits}
    return Score(sum(map(sum, hits.values())) / len(asked), greedy / len(asked), by_kind)


def _of_candidates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    group: Sequence[Asked],
    first: Float[Tensor, "questions vocab"],
) -> list[list[float]]:
    """The log-likelihood of each candidate, given that of each first word; later words take a pass of their own."""
    ids = [[tokenizer.convert_tokens_to_ids(list(c)) for c in one.question.candidates] for one in group]
    likelihoods = [[row[words[0]].item() for words in candidates] for row, candidates in zip(first, ids, strict=True)]
    later = len(ids[0][0]) - 1
    if not later:
        return likelihoods
    places = [(i, j) for i, candidates in enumerate(ids) for j in range(len(candidates))]
    rows = [(*group[i].before, *group[i].question.prompt, *group[i].question.candidates[j]) for i, j in places]
    for (i, j), row in zip(places, log_probabilities(model, tokenizer, rows, later), strict=True):
        likelihoods[i][j] += sum(row[k, ids[i][j][k + 1]].item() for k in range(later))
    return likelihoods


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A toy model in single precision, and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


@dataclass(frozen=True)
class Line:
    """One line of the table: a model on one set of questions."""

    model: str
    setting: str
    with_story: bool
    guess: float
    score: Score


def measure(folders: dict[str, Path], count: int, lengths: Sequence[str] = (SHORT, FULL)) -> list[Line]:
    """Both models on both lengths: right after the story, after ten turns less one, and without the story."""
    lines = []
    for length in lengths:
        direct, later = draw_questions(length, count), draw_questions(length, count, MAX_TURNS - 1)
        sets = [
            (length, True, direct),
            (f"{length}, turn {MAX_TURNS}", True, later),
            (length, False, without_story(direct)),
        ]
        for name, folder in folders.items():
            model, tokenizer = load(folder)
            for setting, with_story, asked in sets:
                lines.append(Line(name, setting, with_story, guess_level(asked), score(model, tokenizer, asked)))
    return lines


def shortcomings(lines: Sequence[Line]) -> list[str]:
    """What is below the bar, in words; empty if it is met."""
    found = []
    choice = {(line.model, line.setting, line.with_story): line.score.choice for line in lines}
    for line in lines:
        got, where = line.score.choice, f"{line.model}, {line.setting}"
        if not line.with_story and abs(got - line.guess) > WITHOUT_STORY_AT_MOST:
            found.append(f"{where}: {got:.3f} without the story is not within {WITHOUT_STORY_AT_MOST} of guessing")
        if line.with_story and line.model == "target" and got < TARGET_AT_LEAST:
            found.append(f"{where}: {got:.3f} is below {TARGET_AT_LEAST}")
        if line.with_story and line.model == "source":
            if got < line.guess + GAP_AT_LEAST:
                found.append(f"{where}: {got:.3f} is not {GAP_AT_LEAST} above guessing")
            if got > choice["target", line.setting, True] - GAP_AT_LEAST:
                found.append(f"{where}: {got:.3f} is not {GAP_AT_LEAST} below the target")
    return found


def show(lines: Sequence[Line], console: Console) -> None:
    """Print the table."""
    table = Table("model", "questions", "story", "guess", "choice", *KINDS, "greedy")
    for line in lines:
        kinds = [f"{line.score.by_kind[kind]:.3f}" if kind in line.score.by_kind else "-" for kind in KINDS]
        numbers = (f"{line.guess:.3f}", f"{line.score.choice:.3f}", *kinds, f"{line.score.greedy:.3f}")
        table.add_row(line.model, line.setting, "yes" if line.with_story else "no", *numbers)
    console.print(table)


def main() -> int:
    """Measure the committed weights; the exit status says whether they meet the bar."""
    lines = measure({"source": SOURCE_DIR, "target": TARGET_DIR}, QUESTIONS)
    console = Console(width=None if sys.stdout.isatty() else 130)
    show(lines, console)
    missing = shortcomings(lines)
    for line in missing:
        console.print(line)
    console.print("the bar is not met" if missing else "the bar is met")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
