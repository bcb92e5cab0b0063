"""What each stage's runs are worth, as flat numbers read from their own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvxfer.files import read_json
from kvxfer.maps.artifact import TRAINING_RECORD
from kvxfer.report.document import RESULTS
from kvxfer.report.full import decisive
from kvxfer.report.kinds import REPORTS
from kvxfer.report.swept import Measure, Numbers


def _baselines(measure: str) -> dict[str, str]:
    return {"source alone": f"source_{measure}", "ceiling": f"ceiling_{measure}"}


MEASURES: dict[str, tuple[Measure, ...]] = {
    "calibrate": (Measure("kept_tokens", "kept tokens", panel=False),),
    "train": (
        Measure("r2_held_out_keys", "held-out R², keys"),
        Measure("r2_held_out_values", "held-out R², values"),
        Measure("kl_held_out", "held-out KL (nats per token)", lines={"base": "kl_held_out_base"}),
        Measure("cosine_held_out", "held-out cosine of attention outputs", column=False),
    ),
    "evaluate": (
        Measure("accuracy", "questions answered", share=True, lines=_baselines("accuracy")),
        Measure("nats", "nats per token (lower is better)", column=False, lines=_baselines("nats")),
        Measure("perplexity", "perplexity", panel=False),
        Measure("gap_recovered_nats", "gap recovered, nats", panel=False, share=True),
    ),
}
"""What a sweep of each stage shows, in order; a measure that no job has is left out."""


def numbers(stage: str, run: Path) -> Numbers:
    """All numbers of a finished run, for the CSV."""
    return _READERS[stage](run)


def _calibrate(run: Path) -> Numbers:
    report = read_json(run / "calibration.json") if (run / "calibration.json").is_file() else {}
    return {"kept_tokens": report.get("kept_tokens", {}).get("fit")}


def _train(run: Path) -> Numbers:
    """Means over target layers. What is chosen from a sweep is chosen on validation, and told on held-out.

    R² of a map that was trained is measured on held-out rows alone; its KL and cosine are those of its record.
    """
    layers = read_json(run / "diagnostics.json")["layers"]
    result: Numbers = {}
    for split in ("held_out", "validation", "fit"):
        for kind in ("keys", "values"):
            scores = [layer[f"r2_{split}"] for layer in layers if layer["kind"] == kind and f"r2_{split}" in layer]
            if scores:
                result[f"r2_{split}_{kind}"] = sum(scores) / len(scores)
    if (run / TRAINING_RECORD).is_file():
        record = read_json(run / TRAINING_RECORD)
        for which, suffix in (("trained", ""), ("base", "_base")):
            result |= {f"{key}_held_out{suffix}": record["held_out"][which][key] for key in ("kl", "cosine")}
        result |= {f"{key}": record[key] for key in ("steps", "best_step", "seconds")}
    return result


def _evaluate(run: Path) -> Numbers:
    results = read_json(run / RESULTS)
    if results["kind"] == "full":
        # What decides stands for the whole.
        results = decisive(results["data"]["parts"], results["verdict"])["results"]
    keys = ("parameters", "flops_per_token", "share_of_prefill_flops", "handoff_share_of_prefill_flops")
    costs = {key: results["map"].get(key) for key in keys}
    return {**REPORTS[results["kind"]].swept(results["data"]), **costs}


_READERS: dict[str, Callable[[Path], Numbers]] = {"calibrate": _calibrate, "train": _train, "evaluate": _evaluate}
