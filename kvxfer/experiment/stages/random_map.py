"""The map of a pair of random weights, in the place where ``train.py`` leaves fitted ones."""

from __future__ import annotations

import logging
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.experiment.runs import open_run
from kvxfer.experiment.settings import CalibrateSettings, EvaluateSettings, TrainSettings
from kvxfer.fitting.random_maps import random_map
from kvxfer.models.pair import random_pair

log = logging.getLogger("kvxfer")


def refuse_random(settings: CalibrateSettings) -> None:
    """Only time can be measured with random weights: refuse whatever would learn or score something with them."""
    timed = isinstance(settings, EvaluateSettings) and getattr(settings.eval, "kind", "") == "latency"
    if settings.pair.random_weights and not timed:
        asked = f"eval={settings.eval.name}" if isinstance(settings, EvaluateSettings) else "calibration"
        raise KvxferError(
            f"pair={settings.pair.name} has random weights, so {asked} would tell nothing: evaluate.py eval=latency is "
            "what it is for; choose another pair for anything else"
        )


def make_random_map(settings: TrainSettings) -> Path:
    """The directory of the pair's random map, made now if it is not there yet."""
    if settings.training is not None:
        raise KvxferError(
            f"solver={settings.training.spec.name} is trained, which random weights (pair={settings.pair.name}) cannot "
            "be: choose a closed form, e.g. solver=ridge"
        )
    config = {**settings.solver_config, "random_weights": settings.pair_identity}
    with open_run(settings.outputs, "train", config, {}) as run:
        if not run.done:
            pair = random_pair(settings.pair, "meta")
            manifest = {
                "pair": pair.describe(),
                **settings.solver_config,
                "longest_context": pair.longest_context,
                "run_id": run.id,
                "calibration": None,
            }
            made = random_map(pair, settings.solver, manifest).save(run.work)
            log.info("map %s has random weights: %.3g parameters", run.id, made.parameters)
            run.commit()
        return run.path
