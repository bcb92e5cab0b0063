"""The pair that a config names."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.models.pair import ModelSpec, PairSpec


def pair_spec(conf: Any, solver: Any | None) -> PairSpec:
    """The pair of group ``pair``; ``solver``, where the stage has one, says how many source layers a slice needs."""
    return PairSpec(
        name=conf.name,
        source=_model(conf.source),
        target=_model(conf.target),
        dtype=conf.dtype,
        device=conf.device,
        attention=conf.attention,
        reverse=conf.reverse,
        random_weights=conf.random_weights,
        slices=_slices(conf, solver),
    )


def _model(conf: Any) -> ModelSpec:
    return ModelSpec(conf.model, conf.revision, tuple(conf.drop_layers))


def _slices(conf: Any, solver: Any | None) -> tuple[int | None, int | None]:
    """Layers of source and target: a target layer reads k source layers, so the source has at least so many."""
    if conf.layers is None:
        return None, None
    if not conf.random_weights:
        raise KvxferError(
            f"pair.layers={conf.layers} times a slice of random weights (pair=geometry); with pair={conf.name} leave "
            "it out"
        )
    if conf.layers < 1:
        raise KvxferError(f"pair.layers={conf.layers} must be 1 or more, or null for all layers")
    k = solver.k if solver is not None and isinstance(solver.k, int) else 1
    return max(conf.layers, k), conf.layers
