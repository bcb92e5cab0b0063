"""``train.py``: a map, fitted or trained as its solver says."""

from __future__ import annotations

from pathlib import Path

from kvxfer.experiment.settings import TrainSettings
from kvxfer.experiment.stages.fit import fit_map, fitted_id
from kvxfer.experiment.stages.train_network import train_network, trained_id


def train(settings: TrainSettings) -> Path:
    """Fit or train (or find) the map and return its run's directory, which is the artifact."""
    return fit_map(settings) if settings.training is None else train_network(settings)


def train_id(settings: TrainSettings) -> str | None:
    """The id of the map that these settings ask for; None for one that is trained on a base which is not there yet."""
    return fitted_id(settings) if settings.training is None else trained_id(settings)
