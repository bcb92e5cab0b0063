"""The map that an evaluation is about, and that of the other direction: found, or fitted now."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Evaluation
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.fit import named_map
from kvxfer.experiment.stages.random_map import make_random_map
from kvxfer.experiment.stages.train import train, train_id
from kvxfer.files import RECORD

log = logging.getLogger("kvxfer")


def find_map(settings: EvaluateSettings, key: str = "map") -> Path:
    """The directory of the map: ``settings.map`` if it is given, else that of the config, fitted now if it is missing.

    Args:
        key: the setting that ``settings.map`` comes from, for messages.
    """
    if settings.map is not None:
        return named_map(settings.outputs, settings.map, key)
    if settings.pair.random_weights:
        return make_random_map(settings)
    home, identifier = settings.outputs / "train", train_id(settings)
    if identifier is not None and (home / identifier / RECORD).is_file():
        return home / identifier
    said = f"map {identifier}" if identifier else f"{settings.solver_config['solver']['name']} map, nor its base,"
    if not settings.build_missing:
        raise KvxferError(f"no {said} in {home}: run train.py with these settings, or set build_missing=true")
    log.info("%s is missing and is made first", "the map" if identifier is None else said)
    return train(replace(settings, force=False))


def find_reverse(settings: EvaluateSettings, spec: Evaluation) -> Path | None:
    """The map of the same models the other way round, if the evaluation needs one.

    It is ``eval.reverse_map``, or the one that the run's settings ask for with ``pair.reverse`` turned over.
    """
    if not spec.needs_reverse(settings.pair.reverse):
        return None
    pair = replace(settings.pair, reverse=not settings.pair.reverse)
    log.info("the map of %s is needed too", pair.label)
    return find_map(replace(settings, pair=pair, map=getattr(spec, "reverse_map", None)), "eval.reverse_map")
