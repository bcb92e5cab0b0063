"""Plain settings of each stage, and their scientific part, which a run's id is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from kvxfer.calibration import CalibrationSpec
from kvxfer.corpus import CorpusSpec, RowCounts
from kvxfer.errors import KvxferError
from kvxfer.evals.items import EvalSpec
from kvxfer.features import DESIGNS, Features
from kvxfer.loggers import LoggerSpec
from kvxfer.pairs import ModelSpec, PairSpec, pair_identity
from kvxfer.penalties import PENALTIES
from kvxfer.plan import Plan
from kvxfer.ranks import RANKS
from kvxfer.solvers import SOLVERS, Solver


@dataclass(frozen=True)
class CalibrateSettings:
    """What ``calibrate.py`` needs."""

    pair: PairSpec
    corpus: CorpusSpec
    calibration: CalibrationSpec
    logger: LoggerSpec
    outputs: Path
    force: bool

    @cached_property
    def pair_identity(self) -> dict[str, Any]:
        """Both models as run ids know them; reading local folders takes a moment, so it is done once."""
        return pair_identity(self.pair)

    def calibration_config(self, shard: bool) -> dict[str, Any]:
        """What decides the moments. ``shard`` adds which share of the rows this process takes."""
        corpus = self.corpus.identity()
        # Text that only evaluation reads does not change the moments.
        corpus["rows"] = {k: v for k, v in corpus["rows"].items() if k != "evaluation"}
        config: dict[str, Any] = {"pair": self.pair_identity, "corpus": corpus}
        config["calibration"] = self.calibration.identity()
        if shard and self.corpus.num_shards > 1:
            config["shard"] = [self.corpus.shard_index, self.corpus.num_shards]
        return config

    def columns(self) -> dict[str, Any]:
        """Flat columns that every logged run has."""
        return {
            "pair": self.pair.label,
            "corpus": self.corpus.name,
            "calibration_features": self.calibration.features.name,
        }


@dataclass(frozen=True)
class TrainSettings(CalibrateSettings):
    """What ``train.py`` needs."""

    solver: Solver
    solver_config: dict[str, Any]
    build_missing: bool

    def columns(self) -> dict[str, Any]:
        """Flat columns that every logged run has."""
        c = self.solver_config
        names = {key: c[key]["name"] for key in ("solver", "penalty", "rank", "features")}
        return {**super().columns(), **names, **dials(c)}


def dials(config: dict[str, Any]) -> dict[str, Any]:
    """The values that grids sweep, from a map's scientific config; those that an option does not read are None."""
    solver, penalty, rank = config["solver"], config["penalty"], config["rank"]
    return {"k": solver["k"], "lam": penalty["lam"], "alpha": penalty.get("alpha"), "r": rank.get("r")}


@dataclass(frozen=True)
class EvaluateSettings(TrainSettings):
    """What ``evaluate.py`` needs."""

    plan: Plan
    eval: EvalSpec
    map: str | None


def _model(conf: Any) -> ModelSpec:
    return ModelSpec(conf.model, conf.revision, tuple(conf.drop_layers))


def label(columns: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The name and the tags of a logged run about a map."""
    name = f"{columns['pair']}/{columns['features']}-{columns['solver']}-{columns['penalty']}-{columns['rank']}"
    return name, tuple(str(columns[key]) for key in ("pair", "solver", "penalty", "rank", "features"))


def _common(conf: Any, features: Features | None) -> dict[str, Any]:
    pair = PairSpec(
        name=conf.pair.name,
        source=_model(conf.pair.source),
        target=_model(conf.pair.target),
        dtype=conf.pair.dtype,
        device=conf.pair.device,
        attention=conf.pair.attention,
        reverse=conf.pair.reverse,
    )
    corpus = CorpusSpec(**{**vars(conf.corpus), "rows": RowCounts(**vars(conf.corpus.rows))})
    corpus.validate()
    keeps = design(conf.pair.features, "pair.features")
    if conf.calibration.features != "auto":
        keeps = design(conf.calibration.features, "calibration.features")
    elif features is not None and not keeps.covers(features):
        keeps = keeps.joined(features)
    layers = conf.calibration.layers
    spec = {**vars(conf.calibration), "features": keeps, "layers": None if layers is None else tuple(layers)}
    if conf.logger.directory is None:
        conf.logger.directory = conf.paths.outputs
    logger = LoggerSpec(**{**vars(conf.logger), "tags": tuple(conf.logger.tags)})
    logger.validate()
    return {
        "pair": pair,
        "corpus": corpus,
        "calibration": CalibrationSpec(**spec),
        "logger": logger,
        "outputs": Path(conf.paths.outputs),
        "force": conf.force,
    }


def design(name: str, key: str) -> Features:
    """A named design, or several joined by ``+``; an error names the key."""
    parts = name.split("+")
    if not set(parts) <= set(DESIGNS):
        raise KvxferError(f"{key}={name!r} is none of {', '.join(DESIGNS)}")
    return reduce(Features.joined, (DESIGNS[part] for part in parts))


def _choice(options: dict[str, Any], name: str, key: str) -> Any:
    if name not in options:
        raise KvxferError(f"{key}.name={name!r} is none of {', '.join(options)}: choose an option with {key}=<name>")
    return options[name]


_FEATURES = ("kinds", "previous", "target_embedding", "target_layer0", "random_relu")


def _features(conf: Any) -> Features:
    given = {key: getattr(conf.features, key) for key in _FEATURES}
    if conf.features.name != "auto":
        return Features(conf.features.name, **{key: value for key, value in given.items() if value is not None})
    for key, value in given.items():
        if value is not None:
            raise KvxferError(f"features.{key}={value} has no effect with features=auto: choose e.g. features=both")
    return design(conf.pair.features, "pair.features")


def _normalise(conf: Any) -> None:
    """1 and 1.0 are the same question and must have the same id: λ and α are floats, whole k and ranks integers."""
    for key in ("lam", "alpha"):
        value = getattr(conf.penalty, key)
        if isinstance(value, int):
            setattr(conf.penalty, key, float(value))
    for group, key in ((conf.solver, "k"), (conf.rank, "r")):
        value = getattr(group, key)
        if isinstance(value, float) and value.is_integer():
            setattr(group, key, int(value))


def _training(conf: Any) -> dict[str, Any]:
    if conf.corpus.num_shards != 1:
        raise KvxferError(
            f"corpus.num_shards={conf.corpus.num_shards}: only calibrate.py shares rows between processes; run it for "
            "every corpus.shard_index first, then this without corpus.num_shards"
        )
    features = _features(conf)
    penalty_class = _choice(PENALTIES, conf.penalty.name, "penalty")
    rank_class = _choice(RANKS, conf.rank.name, "rank")
    solver_class = _choice(SOLVERS, conf.solver.name, "solver")
    _normalise(conf)
    penalty = penalty_class(**vars(conf.penalty))
    rank = rank_class(**vars(conf.rank))
    solver = solver_class(**vars(conf.solver), features=features, penalty=penalty, rank=rank)
    if solver.needs_metrics and not conf.calibration.metrics:
        raise KvxferError(
            "calibration.metrics=false, but penalty=attention, rank.metric=attention and solver.criterion=query weigh "
            "errors by the target's attention: set calibration.metrics=true"
        )
    config = {
        "solver": vars(conf.solver),
        "penalty": penalty.to_dict(),
        "rank": rank.to_dict(),
        "features": vars(features),
    }
    return {
        **_common(conf, features),
        "solver": solver,
        "solver_config": config,
        "build_missing": conf.build_missing,
    }


def calibrate(conf: Any) -> CalibrateSettings:
    """Settings of ``calibrate.py``."""
    return CalibrateSettings(**_common(conf, None))


def train(conf: Any) -> TrainSettings:
    """Settings of ``train.py``."""
    return TrainSettings(**_training(conf))


def evaluate(conf: Any) -> EvaluateSettings:
    """Settings of ``evaluate.py``."""
    plan = Plan(**vars(conf.plan))
    return EvaluateSettings(**_training(conf), plan=plan, eval=EvalSpec(**vars(conf.eval)), map=conf.map)
