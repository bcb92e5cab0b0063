"""``evaluate.py eval=full``: every part as a run of its own, then one report of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, NotApplicable, file_error
from kvxfer.evals.specs import FullSpec
from kvxfer.experiment.loggers import open_logger
from kvxfer.experiment.runs import Run, environment, open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.describing import EVIDENCE_FILE, columns, keep_evidence, logged_metrics
from kvxfer.files import RECORD, file_sha256, read_json, write_json
from kvxfer.maps.artifact import CacheMap
from kvxfer.report.console import say
from kvxfer.report.document import PAGE, RESULTS, written
from kvxfer.report.full import decisive, measured, missing, overall
from kvxfer.report.rendering import plain, terminal, write

log = logging.getLogger("kvxfer")

Measure = Callable[[EvaluateSettings], list[Path]]


def _part(
    name: str, settings: EvaluateSettings | NotApplicable, measure: Measure
) -> tuple[dict[str, Any], Path | None]:
    """A part's results and folder, or why it was not measured: one that fails must not lose the others."""
    try:
        if isinstance(settings, NotApplicable):
            raise settings
        log.info("part %s", name)
        folder = measure(replace(settings, logger=settings.logger.of_inputs))[-1].parent
        seconds = float(read_json(folder / RECORD)["seconds"])
        return measured(name, read_json(folder / RESULTS), seconds), folder
    except NotApplicable as reason:
        log.info("part %s is skipped: %s", name, reason)
        return missing(name, "skipped", str(reason)), None
    except Exception as error:
        known = error if isinstance(error, KvxferError) else file_error(error)
        said = str(known or f"{type(error).__name__}: {error}")
        log.error("part %s failed: %s", name, said, exc_info=known is None)
        return missing(name, "failed", said), None


def full(
    settings: EvaluateSettings, spec: FullSpec, directory: Path, measure: Measure, show: bool = True
) -> list[Path]:
    """Measure all parts (or find that they were) and return the paths of report.md, report.html and results.json.

    Args:
        directory: where the map lies.
        measure: an evaluation of settings, which gives the paths that it left.
        show: print what came out; otherwise it is logged.

    Raises:
        KvxferError: no part could be measured, or some failed; the report of the others is written before.
    """
    found = {name: _part(name, part, measure) for name, part in settings.parts.items()}
    parts = [part for part, _ in found.values()]
    folders = {name: folder for name, (_, folder) in found.items() if folder is not None}
    together = overall(parts)
    cache_map = CacheMap.load(directory)
    gone = {p["name"]: [p["status"], p["reason"]] for p in parts if p["status"] != "measured"}
    config = {"eval": {**settings.asked(), "missing": gone}, "pair": settings.pair_identity}
    inputs = {"train": cache_map.hash, **{name: folder.name for name, folder in folders.items()}}
    # A part that is measured again keeps its id, and may say something else.
    inputs |= {f"{name}.sha256": file_sha256(folder / RESULTS) for name, folder in folders.items()}
    with open_run(settings.outputs, "evaluate", config, inputs, settings.force) as run:
        if not run.done:
            results = _results(run, parts, together, inputs)
            # The parts have logged their numbers themselves, unless a W&B agent left this run alone to log.
            with open_logger(settings.logger, run, columns(settings, cache_map)) as out:
                out.metrics(logged_metrics(decisive(parts, together)["results"]))
                write(results, run.work, folders)
                evidence = {key: value for key, value in results.items() if key not in ("data", "map")}
                write_json(run.work / EVIDENCE_FILE, plain(evidence))
                for figure in sorted((run.work / "figures").glob("*.png")):
                    out.figure(figure.stem, figure)
                out.artifact(f"eval-{run.id}", "kv-eval", written(run.work), {"map": cache_map.hash})
            run.commit()
    keep_evidence(cache_map, directory, run.path)
    results = read_json(run.path / RESULTS)
    if show:
        say(terminal(results))
    else:
        log.info("%s: %s", results["title"], results["verdict"]["sentence"])
    if failed := [part for part in parts if part["status"] == "failed"]:
        said = "; ".join(f"{part['name']}: {part['reason']}" for part in failed)
        raise KvxferError(f"{len(failed)} of {len(parts)} parts failed ({said}); see {run.path / PAGE}")
    return written(run.path)


def _results(
    run: Run, parts: list[dict[str, Any]], verdict: Mapping[str, Any], inputs: Mapping[str, str]
) -> dict[str, Any]:
    first = decisive(parts, verdict)["results"]
    before = first["provenance"]
    known = [part["results"]["provenance"] for part in parts if part["status"] == "measured"]
    said = [remark for part in known for remark in part.get("warnings", [])]
    provenance = {
        "inputs": {**inputs, "train": before["inputs"]["train"], "map": before["inputs"]["map"]},
        "config": run.record["config"],
        "environment": environment(),
        "started": run.record["started"],
        "warnings": list(dict.fromkeys(said)),
    }
    own = {"kind": FullSpec.kind, "run_id": run.id, "verdict": dict(verdict), "data": {"parts": parts}}
    return {**first, **own, "provenance": {**before, **provenance}}
