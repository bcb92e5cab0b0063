"""``make demo``: the same pair under every design, side by side."""

from __future__ import annotations

from pathlib import Path

import torch

from kvxfer.evals.items import text_items, toy_items
from kvxfer.experiment.generating import hand_over
from kvxfer.experiment.runs import open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.evaluate import evaluate
from kvxfer.experiment.stages.train import find_map
from kvxfer.files import read_json
from kvxfer.handoff.policy import Policy
from kvxfer.handoff.serving import Handoff
from kvxfer.models.pair import load_pair
from kvxfer.report.console import say
from kvxfer.report.designs import compare_designs
from kvxfer.report.document import RESULTS, written
from kvxfer.report.rendering import terminal, write


def compare(settings: dict[str, EvaluateSettings]) -> list[Path]:
    """Evaluate each design (calibrating and fitting what is missing) and write one report about all of them.

    Args:
        settings: those of an evaluation, by the design's name; they differ in nothing else.

    Returns:
        The paths of report.md, report.html and results.json.
    """
    results = {name: read_json(evaluate(each, show=False)[-1]) for name, each in settings.items()}
    first = next(iter(settings.values()))
    inputs = {name: result["run_id"] for name, result in results.items()}
    with open_run(first.outputs, "compare", {}, inputs, first.force) as run:
        if not run.done:
            title = f"{first.pair.label}: {', '.join(settings)} compared"
            write(compare_designs(results, title), run.work)
            run.commit()
    found = read_json(run.path / RESULTS)
    say(terminal(found))
    _one_handoff(settings[found["data"]["best"]])
    return written(run.path)


def _one_handoff(settings: EvaluateSettings) -> None:
    """Hand over the cache of one prompt of the evaluation's, in front of the reader."""
    pair, corpus = load_pair(settings.pinned), settings.corpus
    item = (
        toy_items(pair.tokenizer, corpus.length, 1, 1, seed=0)
        if corpus.kind == "toy"
        else text_items(corpus, pair.tokenizer, corpus.length)
    )[0]
    handoff = Handoff.of(pair, find_map(settings), Policy(min_tokens=0), plan=settings.plan)
    say("One handoff, however short (policy.min_tokens=0: break-even is not asked for).", "")
    say(f"prompt: {pair.tokenizer.decode(item.prompt)}", "")
    say("answer: ", end="")
    hand_over(handoff, torch.tensor([item.prompt]), len(item.answer) + 1)
