"""``make demo``: the same pair under every design, side by side."""

from __future__ import annotations

from pathlib import Path

from kvxfer.experiment.runs import open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.evaluate import evaluate
from kvxfer.files import read_json
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
    say(terminal(read_json(run.path / RESULTS)))
    return written(run.path)
