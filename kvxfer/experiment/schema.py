"""What a key of a config may hold, derived from the frozen dataclasses that hold the values; and the way back.

The dataclasses are the one declaration of every setting. ``config`` gives Hydra what is derived from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import omegaconf

from kvxfer.errors import KvxferError
from kvxfer.evals.specs import SPECS
from kvxfer.experiment.loggers import LoggerSpec
from kvxfer.fitting.dials import PENALTIES, RANKS, AutoDials, Dials
from kvxfer.fitting.trained.specs import TRAINED, TrainerSpec
from kvxfer.maps.blocks import Features
from kvxfer.maps.plan import Plan
from kvxfer.models.spec import PairSpec
from kvxfer.moments.spec import CalibrationSpec
from kvxfer.text.spec import CorpusSpec

T = TypeVar("T")

DIALS = ("features", "penalty", "rank")
"""Fields of a solver that are groups of their own."""


@dataclass
class Named:
    """An option that reads nothing but its name."""

    name: str


@dataclass
class Paths:
    """``paths``."""

    outputs: str = "outputs"


@dataclass
class EvalConf:
    """What every option of ``eval`` has: its name, and which evaluation it sets."""

    name: str = omegaconf.MISSING
    kind: str = omegaconf.MISSING


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type; tuples are lists in a config."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(list[get_args(kind)[0]] if get_origin(kind) is tuple else kind for kind in kinds)  # type: ignore[misc]


def _union(kinds: Iterable[Any]) -> Any:
    """Of these types; where a number is one of several, it may be written with a point or without."""
    found = dict.fromkeys(kinds)
    if len(found.keys() - {NoneType}) > 1 and found.keys() & {int, float}:
        found |= {int: None, float: None}
    return Union[tuple(found)]  # noqa: UP007  (made of what there is)


def _key(item: Field[Any], hint: Any) -> tuple[Any, Any]:
    """The type of a field's key, and what the key is unless it is given."""
    kinds, default = _alternatives(hint), item.default
    if item.default_factory is not MISSING:
        default = item.default_factory()
    if "given" in item.metadata:
        default = item.metadata["given"]
        kinds = (*(kind for kind in kinds if not is_dataclass(kind)), type(default))
    elif isinstance(hint, type) and is_dataclass(hint):
        nested = derived((hint,))
        return nested, nested
    if default is MISSING or item.name == "name":
        default = omegaconf.MISSING
    return _union(kinds), list(default) if isinstance(default, tuple) else default


def _keys(classes: Iterable[type], without: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The keys that an option reads."""
    return {
        item.name: _key(item, get_type_hints(cls)[item.name])
        for cls in classes
        for item in fields(cls)
        if item.init and item.name not in without
    }


@cache
def derived(*options: tuple[type, ...], without: Sequence[str] = (), bases: tuple[type, ...] = ()) -> type:
    """The schema of a group whose options are given each by the dataclasses that hold its keys.

    A key that not all options have alike may be null, and is so unless it is given. What is given and has no effect
    with the chosen option is refused when its settings are made (``built``).
    """
    every = [_keys(classes, without) for classes in options]
    found = []
    # The name first: it says what the other keys are of.
    for name in sorted(dict.fromkeys(name for keys in every for name in keys), key=lambda name: name != "name"):
        known = [keys.get(name) for keys in every]
        kind, default = next(key for key in known if key is not None)
        if any(key != (kind, default) for key in known):
            kinds = [each for key in known if key is not None for each in _alternatives(key[0])]
            kind, default = _union([*kinds, NoneType]), None
        make = default if isinstance(default, type) else default.copy if isinstance(default, list) else None
        found.append((name, kind, field(default=default) if make is None else field(default_factory=make)))
    return _class(f"{options[0][-1].__name__}Conf", found, bases)


def _class(name: str, found: Sequence[tuple[Any, ...]], bases: tuple[type, ...]) -> type:
    """A dataclass of this module, so that a sweep's worker is sent its name: a copy of it would break the original."""
    made = make_dataclass(name, found, bases=bases)
    made.__module__ = __name__
    assert name not in globals(), name
    globals()[name] = made
    return made


GROUPS: dict[str, type] = {
    "pair": derived((PairSpec,)),
    "corpus": derived((CorpusSpec,)),
    "calibration": derived((CalibrationSpec,)),
    "logger": derived((LoggerSpec,)),
    "paths": derived((Paths,)),
    "features": derived((Features,), (Named,)),
    "solver": derived((Named, Dials), (Named, AutoDials), *((cls, Dials) for cls in TRAINED.values()), without=DIALS),
    "trainer": derived((TrainerSpec,)),
    "penalty": derived(*((cls,) for cls in PENALTIES.values())),
    "rank": derived(*((cls,) for cls in RANKS.values())),
    "plan": derived((Plan,)),
    "eval": EvalConf,
}

EVALS: dict[str, type] = {kind: derived((cls,), bases=(EvalConf,)) for kind, cls in SPECS.items()}
"""Group ``eval`` by the kind that an option is of."""


def _stage(name: str, groups: Sequence[str], more: Sequence[tuple[Any, ...]], *bases: type) -> type:
    found = [(group, GROUPS[group], field(default_factory=GROUPS[group])) for group in groups]
    return _class(name, [*found, *more], bases)


_CALIBRATE = _stage(
    "Calibrate", ["pair", "corpus", "calibration", "logger", "paths"], [("force", bool, False), ("verify", bool, False)]
)
_TRAIN = _stage(
    "Train", ["features", "solver", "trainer", "penalty", "rank"], [("build_missing", bool, True)], _CALIBRATE
)
_OF_MAPS = [("map", Union[str, NoneType], None), ("map_dtype", str, "auto")]  # noqa: UP007
_EVALUATE = _stage("Evaluate", ["plan", "eval"], _OF_MAPS, _TRAIN)

SCHEMAS: dict[str, type] = {"calibrate": _CALIBRATE, "train": _TRAIN, "evaluate": _EVALUATE}


def built(cls: type[T], given: dict[str, Any], option: str, **made: Any) -> T:
    """The settings that some keys of a group say; those of other options are null.

    Args:
        given: the keys.
        option: what is chosen, for the error: ``solver=ridge``; its first word names the group.
        made: fields whose values are made already.

    Raises:
        KvxferError: a key has no effect with the option, or a value makes no sense.
    """
    hints, own = get_type_hints(cls), {item.name for item in fields(cls)} - made.keys()  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key in own:
            if value is not None or NoneType in _alternatives(hints[key]):
                values[key] = _value(hints[key], value)
        elif value is not None and key not in made:
            raise KvxferError(f"{option.partition('=')[0].partition('.')[0]}.{key}={value} has no effect with {option}")
    return cls(**values, **made)


def _value(hint: Any, value: Any) -> Any:
    """A config's value as its field holds it: 1 and 1.0 are one question and must have one id."""
    if isinstance(hint, type) and is_dataclass(hint):
        return built(hint, vars(value), hint.__name__)
    if type(value) is int and float in _alternatives(hint) and int not in _alternatives(hint):
        return float(value)
    return tuple(value) if isinstance(value, list) else value
