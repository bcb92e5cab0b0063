"""``train.py``: a map, fitted or trained as its solver says; and how an evaluation finds the one that it is about."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Evaluation
from kvxfer.experiment.runs import finished
from kvxfer.experiment.settings import EvaluateSettings, TrainSettings
from kvxfer.experiment.stages.fit import fit_map, fitted_id, named_map
from kvxfer.experiment.stages.random_map import make_random_map
from kvxfer.experiment.stages.train_network import train_network, trained_id

log = logging.getLogger("kvxfer")


def train(settings: TrainSettings) -> Path:
    """Fit or train (or find) the map and return its run's directory, which is the artifact."""
    return fit_map(settings) if settings.training is None else train_network(settings)


def train_id(settings: TrainSettings) -> str | None:
    """The id of the map that these settings ask for; None for one that is trained on a base which is not there yet."""
    return fitted_id(settings) if settings.training is None else trained_id(settings)


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
    if identifier is not None and finished(home / identifier):
        return home / identifier
    said = f"map {identifier}" if identifier else f"{settings.solver_config['solver']['name']} map, nor its base,"
    if not settings.build_missing:
        raise KvxferError(f"no {said} in {home}: run train.py with these settings, or set build_missing=true")
    log.info("%s is missing and is made first", "the map" if identifier is None else said)
    return train(settings.as_input())


def find_reverse(settings: EvaluateSettings, spec: Evaluation) -> Path | None:
    """The map of the same models the other way round, if the evaluation needs one.

    It is ``eval.reverse_map``, or the one that the run's settings ask for with ``pair.reverse`` turned over.
    """
    if not spec.needs_reverse(settings.pair.reverse):
        return None
    pair = replace(settings.pair, reverse=not settings.pair.reverse)
    log.info("the map of %s is needed too", pair.label)
    return find_map(replace(settings, pair=pair, map=getattr(spec, "reverse_map", None)), "eval.reverse_map")
