"""The solver that a config names, with its penalty, rank and features, and, where its map is trained, how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import SOLVERS, Solver
from kvxfer.fitting.closed.penalties import PENALTIES
from kvxfer.fitting.closed.ranks import RANKS
from kvxfer.fitting.trained.specs import TRAINED, Trained, TrainerSpec
from kvxfer.maps.blocks import DESIGNS, Features, named

_OF_TRAINING = {item.name for each in TRAINED.values() for item in fields(each)}


@dataclass(frozen=True)
class Training:
    """How a map is trained on a closed-form base.

    Attributes:
        spec: what is trained on which objective.
        trainer: how.
        base_config: the scientific config of the base, as a run that only fits it has it.
    """

    spec: Trained
    trainer: TrainerSpec
    base_config: dict[str, Any]

    def config_on(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The scientific config of the trained map, on a base of some config (or manifest, which holds one)."""
        # A base that was trained itself has keys of its training, which are no settings of this map.
        solver = {key: value for key, value in base["solver"].items() if key not in _OF_TRAINING}
        solver |= {"name": self.spec.name, "base": base["solver"]["name"]}
        shared = {key: base[key] for key in ("penalty", "rank", "features")}
        return {"solver": {**solver, **self.spec.identity()}, **shared, "trainer": self.trainer.identity()}


@dataclass(frozen=True)
class Asked:
    """What group ``solver`` and its neighbours ask for.

    Attributes:
        solver: the closed form, of the base where the map is trained.
        config: the map's scientific config.
        training: how it is trained; None for a closed form.
    """

    solver: Solver
    config: dict[str, Any]
    training: Training | None


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


def solver_of(conf: Any) -> Asked:
    """The solver of a config, checked."""
    features = _features(conf)
    penalty_class = choice(PENALTIES, conf.penalty.name, "penalty")
    rank_class = choice(RANKS, conf.rank.name, "rank")
    option = choice({**SOLVERS, **TRAINED}, conf.solver.name, "solver")
    _normalise(conf)
    penalty = penalty_class(**vars(conf.penalty))
    rank = rank_class(**vars(conf.rank))
    given = {key: value for key, value in vars(conf.solver).items() if value is not None}
    spec, options, said = None, given, "solver"
    if conf.solver.name in TRAINED:
        spec, options, said = _trained(given, option), _base_options(given, option), "solver.base"
    solver_class = SOLVERS[options["name"]]
    _refuse_unread(options, solver_class, f"{said}={options['name']}")
    solver = solver_class(**_plain(options), features=features, penalty=penalty, rank=rank)
    config = {
        "solver": _solver_identity(options),
        "penalty": penalty.to_dict(),
        "rank": rank.to_dict(),
        "features": features.identity(),
    }
    if spec is None:
        return Asked(solver, config, None)
    rate = spec.lr if conf.trainer.lr is None else conf.trainer.lr
    training = Training(spec, TrainerSpec(**{**vars(conf.trainer), "lr": rate}), config)
    return Asked(solver, training.config_on(config), training)


_FEATURES = tuple(field.name for field in fields(Features) if field.name != "name")


def _features(conf: Any) -> Features:
    given = {key: getattr(conf.features, key) for key in _FEATURES}
    if conf.features.name != "auto":
        return named(Features(conf.features.name, **{key: value for key, value in given.items() if value is not None}))
    for key, value in given.items():
        if value is not None:
            raise KvxferError(f"features.{key}={value} has no effect with features=auto: choose e.g. features=both")
    return design(conf.pair.features, "pair.features")


def _normalise(conf: Any) -> None:
    """1 and 1.0 are the same question and must have the same id: λ and α are floats, whole k and ranks integers."""
    reals = [(conf.penalty, "lam"), (conf.penalty, "alpha"), (conf.solver, "selection_lam"), (conf.trainer, "lr")]
    for group, key in reals:
        value = getattr(group, key)
        if isinstance(value, int):
            setattr(group, key, float(value))
    for group, key in ((conf.solver, "k"), (conf.rank, "r")):
        value = getattr(group, key)
        # A rank of 1.0 is no integer but the whole width, which is refused: a grid of shares must not end in rank 1.
        if isinstance(value, float) and value.is_integer() and (key, value) != ("r", 1.0):
            setattr(group, key, int(value))


def _trained(given: Mapping[str, Any], option: type[Trained]) -> Trained:
    """What is trained: the keys of ``solver`` that the option has. The others but ``base`` are for the base."""
    own = {item.name for item in fields(option)}
    for key in given:
        if key in _OF_TRAINING - own:
            raise KvxferError(f"solver.{key}={given[key]} has no effect with solver={given['name']}")
    return option(**_plain({key: value for key, value in given.items() if key in own}))


def _base_options(given: Mapping[str, Any], option: type[Trained]) -> dict[str, Any]:
    """The keys of ``solver`` that are the base's own, as if it alone had been asked for."""
    name = given.get("base")
    if name not in SOLVERS:
        raise KvxferError(f"solver.base={name!r} is none of {', '.join(SOLVERS)}")
    not_its_own = {"base", *(item.name for item in fields(option))}
    options = {key: value for key, value in given.items() if key not in not_its_own}
    # What only this base has (solver=auto's candidates): a trained option's file has no line for it.
    for item in fields(SOLVERS[name]):
        if item.name not in (*options, "features", "penalty", "rank") and item.default is not MISSING:
            options[item.name] = list(item.default) if isinstance(item.default, tuple) else item.default
    return {**options, "name": name}


def _refuse_unread(options: Mapping[str, Any], solver_class: Any, said: str) -> None:
    known = {item.name for item in fields(solver_class)}
    for key, value in options.items():
        if key not in known:
            raise KvxferError(f"solver.{key}={value} has no effect with {said}")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _solver_identity(options: dict[str, Any]) -> dict[str, Any]:
    """The options without what is as it was before it could be chosen, so that old questions keep their ids.

    With ``method=all`` no k is read, so there is none: whatever was given, it is one question.
    """
    if options["method"] == "all":
        options = {**options, "k": None}
    one_k = options["k"] != "auto" or options["k_per"] == "pair"
    return {key: value for key, value in options.items() if not (key == "k_per" and one_k)}
