"""The solver that a config names, with its penalty, rank and features, and, where its map is trained, how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.experiment.schema import DIALS, Named, built
from kvxfer.fitting.closed import SOLVERS, Solver
from kvxfer.fitting.dials import PENALTIES, RANKS
from kvxfer.fitting.trained.specs import TRAINED, Trained, TrainerSpec
from kvxfer.maps.blocks import DESIGNS, Features, named

_OF_TRAINING = {item.name for each in TRAINED.values() for item in fields(each)}


@dataclass(frozen=True)
class Training:
    """How a map is trained on a closed-form base.

    Attributes:
        spec: what is trained on which objective.
        trainer: how.
    """

    spec: Trained
    trainer: TrainerSpec

    def config_on(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The scientific config of the trained map, on a base of some config (or manifest, which holds one)."""
        # A base that was trained itself has keys of its training, which are no settings of this map.
        solver = {key: value for key, value in base["solver"].items() if key not in _OF_TRAINING}
        solver |= {"base": base["solver"]["name"], **identity(self.spec)}
        return {"solver": solver, **{key: base[key] for key in DIALS}, "trainer": identity(self.trainer)}


def fit_config(solver: Solver) -> dict[str, Any]:
    """The scientific config of a closed form's map."""
    return {"solver": identity(solver, DIALS), **{key: identity(getattr(solver, key)) for key in DIALS}}


def design(name: str, key: str) -> Features:
    """A named design, or several joined by ``+``; an error names the key."""
    parts = name.split("+")
    if not set(parts) <= set(DESIGNS):
        raise KvxferError(f"{key}={name!r} is none of {', '.join(DESIGNS)}")
    # In one order: the name is part of a calibration's id.
    return reduce(Features.joined, (DESIGNS[part] for part in sorted(set(parts), key=list(DESIGNS).index)))


def choice(options: Mapping[str, Any], name: str, key: str) -> Any:
    """The option of a group; an error names the group."""
    if name not in options:
        raise KvxferError(f"{key}.name={name!r} is none of {', '.join(options)}: choose an option with {key}=<name>")
    return options[name]


def solver_of(conf: Any) -> tuple[Solver, Training | None]:
    """The solver of a config (of the base where the map is trained), checked, and how its map is trained."""
    given, name = vars(conf.solver), conf.solver.name
    made = {"features": _features(conf)}
    for key, options in (("penalty", PENALTIES), ("rank", RANKS)):
        group = getattr(conf, key)
        made[key] = built(choice(options, group.name, key), vars(group), f"{key}={group.name}")
    option = choice({**SOLVERS, **TRAINED}, name, "solver")
    if name in SOLVERS:
        return built(option, given, f"solver={name}", **made), None
    base = given["base"]
    if base not in SOLVERS:
        raise KvxferError(f"solver.base={base!r} is none of {', '.join(SOLVERS)}")
    rate = option.lr if conf.trainer.lr is None else conf.trainer.lr
    trainer = built(TrainerSpec, {**vars(conf.trainer), "lr": rate}, "trainer")
    # What no trained option reads is for the base.
    own, rest = ({k: v for k, v in given.items() if (k in _OF_TRAINING) == mine} for mine in (True, False))
    training = Training(built(option, own, f"solver={name}"), trainer)
    return built(SOLVERS[base], rest, f"solver.base={base}", name=base, **made), training


def _features(conf: Any) -> Features:
    given = vars(conf.features)
    if conf.features.name == "auto":
        built(Named, given, "features=auto")
        return design(conf.pair.features, "pair.features")
    return named(built(Features, given, f"features={conf.features.name}"))
