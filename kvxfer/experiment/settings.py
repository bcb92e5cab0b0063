"""Plain settings of each stage, and their scientific part, which a run's id is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, NotApplicable
from kvxfer.evals.evaluation import Evaluation
from kvxfer.evals.full import FullSpec
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.questions import Questions
from kvxfer.experiment.loggers import LoggerSpec
from kvxfer.experiment.pair_settings import pair_spec
from kvxfer.experiment.solver_settings import Training, choice, design, solver_of
from kvxfer.fitting.closed import Solver
from kvxfer.maps.blocks import Features
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import PairSpec, pair_identity
from kvxfer.moments.calibration import CalibrationSpec
from kvxfer.text.corpus import CorpusSpec, RowCounts


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
        config["calibration"] = self.calibration.identity(self.corpus.rows)
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
    """What ``train.py`` needs. ``solver`` is the closed form: of the map, or of the base that a map is trained on."""

    solver: Solver
    solver_config: dict[str, Any]
    build_missing: bool
    training: Training | None = field(default=None, kw_only=True)

    def base(self) -> TrainSettings:
        """The settings of the closed-form base alone."""
        if self.training is None:
            return self
        return replace(self, training=None, solver_config=self.training.base_config)

    def columns(self) -> dict[str, Any]:
        """Flat columns that every logged run has."""
        c = self.solver_config
        names = {key: c[key]["name"] for key in ("solver", "penalty", "rank", "features")}
        return {**super().columns(), **names, **dials(c)}


def dials(config: dict[str, Any]) -> dict[str, Any]:
    """The values that grids sweep, from a map's scientific config; those that an option does not read are None."""
    solver, penalty, rank = config["solver"], config["penalty"], config["rank"]
    found = {"k": solver["k"], "lam": penalty["lam"], "alpha": penalty.get("alpha"), "r": rank.get("r")}
    if (trainer := config.get("trainer")) is not None:
        found |= {"trainer_seed": trainer["seed"], "max_steps": trainer["max_steps"], "lr": trainer["lr"]}
    return found


@dataclass(frozen=True)
class EvaluateSettings(TrainSettings):
    """What ``evaluate.py`` needs."""

    plan: Plan
    eval: Evaluation | FullSpec
    map: str | None
    domains: tuple[CorpusSpec, ...] = ()
    parts: Mapping[str, EvaluateSettings | NotApplicable] = field(default_factory=dict)


def label(columns: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The name and the tags of a logged run about a map."""
    name = f"{columns['pair']}/{columns['features']}-{columns['solver']}-{columns['penalty']}-{columns['rank']}"
    if "trainer_seed" in columns:
        name += f"-seed{columns['trainer_seed']}"
    return name, tuple(str(columns[key]) for key in ("pair", "solver", "penalty", "rank", "features"))


def _corpus(conf: Any) -> CorpusSpec:
    corpus = CorpusSpec(**{**vars(conf), "rows": RowCounts(**vars(conf.rows))})
    corpus.validate()
    return corpus


AUTO_PROBE_ROWS = 16


def _probe_rows(conf: Any, needed: bool) -> int:
    """``calibration.probe_rows`` as a number."""
    value = conf.calibration.probe_rows
    if value == "auto":
        return AUTO_PROBE_ROWS if needed else 0
    if isinstance(value, str) or not math.isfinite(value) or value != int(value):
        raise KvxferError(f"calibration.probe_rows={value} must be a whole number of rows, or auto")
    if needed and not value:
        raise KvxferError(
            "calibration.probe_rows=0, but solver=auto and solver.criterion=attention are decided on a probe: set "
            f"calibration.probe_rows={AUTO_PROBE_ROWS}, or auto"
        )
    return int(value)


def _common(conf: Any, features: Features | None, probe: bool = False, weights: bool = False) -> dict[str, Any]:
    """What all stages share. ``features``, ``probe`` and ``weights`` are what the solver reads, where there is one."""
    corpus = _corpus(conf.corpus)
    keeps = design(conf.pair.features, "pair.features")
    if conf.calibration.features != "auto":
        keeps = design(conf.calibration.features, "calibration.features")
        if features is not None and not keeps.covers(features):
            raise KvxferError(
                f"calibration.features={conf.calibration.features} does not keep what features={features.name} reads: "
                "name designs that cover it (several: same+relu), or leave calibration.features=auto"
            )
    elif features is not None and not keeps.covers(features):
        keeps = keeps.joined(features)
    for key in ("previous", "target_embedding"):
        if (getattr(keeps, key) or 0) >= corpus.length:
            raise KvxferError(
                f"features.{key}={getattr(keeps, key)} reads further back than a row of corpus.length={corpus.length} "
                f"goes: lower features.{key} or raise corpus.length"
            )
    layers = conf.calibration.layers
    spec = {
        **vars(conf.calibration),
        "features": keeps,
        "layers": None if layers is None else tuple(layers),
        "probe_rows": _probe_rows(conf, probe),
    }
    if conf.calibration.weights == "auto":
        spec["weights"] = "attention" if weights else "none"
    if conf.logger.directory is None:
        conf.logger.directory = conf.paths.outputs
    logger = LoggerSpec(**{**vars(conf.logger), "tags": tuple(conf.logger.tags)})
    logger.validate()
    return {
        "pair": pair_spec(conf.pair, getattr(conf, "solver", None)),
        "corpus": corpus,
        "calibration": CalibrationSpec(**spec),
        "logger": logger,
        "outputs": Path(conf.paths.outputs),
        "force": conf.force,
    }


def _training(conf: Any) -> dict[str, Any]:
    if conf.corpus.num_shards != 1:
        raise KvxferError(
            f"corpus.num_shards={conf.corpus.num_shards}: only calibrate.py shares rows between processes; run it for "
            "every corpus.shard_index first (with the calibration settings that build_missing=false names here), then "
            "this without corpus.num_shards"
        )
    asked = solver_of(conf)
    solver: Any = asked.solver
    if solver.needs_metrics and not conf.calibration.metrics:
        raise KvxferError(
            "calibration.metrics=false, but penalty=attention, rank.metric=attention and solver.criterion=query weigh "
            "errors by the target's attention: set calibration.metrics=true"
        )
    keep = conf.calibration.keep_layers
    if keep is not None and solver.k != "auto" and solver.k > keep and solver.method != "all":
        raise KvxferError(
            f"solver.k={solver.k} is more than calibration.keep_layers={keep}, the source layers of each target layer: "
            "lower solver.k or raise calibration.keep_layers"
        )
    # Where weights are not wanted, auto leaves out the candidates that read them.
    if solver.needs_weights and conf.calibration.weights == "none" and solver.name != "auto":
        raise KvxferError(
            f"calibration.weights=none, but solver={solver.name} weighs tokens by the target's attention: "
            "set calibration.weights=auto"
        )
    return {
        **_common(conf, solver.features, solver.needs_probe, solver.needs_weights),
        "solver": solver,
        "solver_config": asked.config,
        "training": asked.training,
        "build_missing": conf.build_missing,
    }


def calibrate(conf: Any) -> CalibrateSettings:
    """Settings of ``calibrate.py``."""
    return CalibrateSettings(**_common(conf, None))


def train(conf: Any) -> TrainSettings:
    """Settings of ``train.py``."""
    return TrainSettings(**_training(conf))


def evaluate(
    conf: Any, domains: Sequence[Any] = (), parts: Mapping[str, EvaluateSettings | NotApplicable] | None = None
) -> EvaluateSettings:
    """Settings of ``evaluate.py``; ``domains`` and ``parts`` are what ``eval.domains`` and ``eval.parts`` name."""
    plan = Plan(**vars(conf.plan))
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(conf.eval).items()}
    del given["kind"]
    spec = choice({"full": FullSpec, **KINDS}, conf.eval.kind, "eval.kind")(**given)
    if isinstance(spec, Questions) and spec.choices and conf.corpus.kind == "toy":
        raise NotApplicable(
            f"eval.choices={conf.eval.choices} asks which text follows, and corpus={conf.corpus.name} has questions of "
            "its own: use eval=mapped or eval=standard"
        )
    texts = tuple(_corpus(each) for each in domains)
    return EvaluateSettings(**_training(conf), plan=plan, eval=spec, map=conf.map, domains=texts, parts=parts or {})
