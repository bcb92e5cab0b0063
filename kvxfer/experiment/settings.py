"""Plain settings of each stage, and their scientific part, which a run's id is made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, NotApplicable
from kvxfer.evals.evaluation import Evaluation
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.specs import FullSpec, QuestionsSpec
from kvxfer.experiment import pins
from kvxfer.experiment.identity import identity
from kvxfer.experiment.loggers import LoggerSpec
from kvxfer.experiment.schema import DIALS, Named, built
from kvxfer.fitting.closed import SOLVERS, Solver
from kvxfer.fitting.dials import PENALTIES, RANKS
from kvxfer.fitting.trained.specs import TRAINED, Trained, TrainerSpec
from kvxfer.maps.blocks import DESIGNS, Features, named
from kvxfer.maps.plan import MAP_DTYPES, Plan
from kvxfer.models.spec import PairSpec
from kvxfer.moments.spec import CALIBRATION_SPLITS, CalibrationSpec
from kvxfer.text.spec import TRAINING, CorpusSpec


@dataclass(frozen=True)
class CalibrateSettings:
    """What ``calibrate.py`` needs."""

    pair: PairSpec
    corpus: CorpusSpec
    calibration: CalibrationSpec
    logger: LoggerSpec
    outputs: Path
    force: bool
    verify: bool

    @cached_property
    def pinned(self) -> PairSpec:
        """The pair at the commits that a hub's names stand for in these outputs: what is loaded."""
        return pins.pinned(self.pair, self.outputs)

    @cached_property
    def pair_identity(self) -> dict[str, Any]:
        """Both models as run ids know them; reading local folders takes a moment, so it is done once."""
        if self.verify:
            pins.verify(self.pinned)
        return identity(self.pinned)

    def calibration_config(self, shard: bool) -> dict[str, Any]:
        """What decides the moments. ``shard`` adds which share of the rows this process takes."""
        # Text that only training and evaluation read does not change the moments.
        corpus = identity(self.corpus, unread=("rows.evaluation", "rows.training"))
        config: dict[str, Any] = {"pair": self.pair_identity, "corpus": corpus}
        config["calibration"] = identity(self.calibration)
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

    def as_input(self) -> TrainSettings:
        """The settings of what a run makes first because it is missing: never anew if it is there after all."""
        return replace(self, force=False, logger=self.logger.of_inputs)

    def base(self) -> TrainSettings:
        """The settings of the closed-form base alone."""
        if self.training is None:
            return self
        return replace(self, training=None, solver_config=fit_config(self.solver))

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), **dials(self.solver_config)}


def dials(config: dict[str, Any]) -> dict[str, Any]:
    """Options and the values that grids sweep, of a map's scientific config; what an option does not read is None."""
    solver, penalty, rank = config["solver"], config["penalty"], config["rank"]
    found = {key: config[key]["name"] for key in ("solver", "penalty", "rank", "features")}
    found |= {"k": solver["k"], "lam": penalty["lam"], "alpha": penalty.get("alpha"), "r": rank.get("r")}
    if (trainer := config.get("trainer")) is not None:
        found |= {"trainer_seed": trainer["seed"], "max_steps": trainer["max_steps"], "lr": trainer["lr"]}
    return found


@dataclass(frozen=True)
class EvaluateSettings(TrainSettings):
    """What ``evaluate.py`` needs."""

    plan: Plan
    eval: Evaluation | FullSpec
    map: str | None
    map_dtype: str = "auto"
    domains: tuple[CorpusSpec, ...] = ()
    parts: Mapping[str, EvaluateSettings | NotApplicable] = field(default_factory=dict)

    def asked(self, unread: Collection[str] = ()) -> dict[str, Any]:
        """What decides an evaluation's numbers beside the map."""
        return {"kind": self.eval.kind, "version": self.eval.version, **identity(self.eval, unread)}

    def read(self, corpus: CorpusSpec) -> dict[str, Any]:
        """What of a text decides an evaluation."""
        return identity(corpus, [*(f"rows.{split}" for split in (*CALIBRATION_SPLITS, TRAINING)), "skip_first"])

    def question(self, unread: Collection[str] = ()) -> dict[str, Any]:
        """What decides the numbers of an evaluation of some map; ``unread`` are fields of it that don't."""
        asked = {"eval": self.asked(unread), "plan": identity(self.plan)}
        return {"pair": self.pair_identity, "corpus": self.read(self.corpus), **asked}


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


def _common(conf: Any, solver: Any | None = None) -> dict[str, Any]:
    """What all stages share; ``solver`` says what it reads, where there is one."""
    features = None if solver is None else solver.features
    corpus = built(CorpusSpec, vars(conf.corpus), "corpus")
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
    given = vars(conf.calibration)
    auto: dict[str, Any] = {"features": keeps}
    auto["probe_rows"] = _probe_rows(conf, solver is not None and solver.needs_probe)
    if given["weights"] == "auto":
        auto["weights"] = "attention" if solver is not None and solver.needs_weights else "none"
    # The first pass reads no more rows than there are.
    rows = min(given["selection_rows"], max(corpus.rows.fit, corpus.rows.validation, 1))
    pair = built(PairSpec, vars(conf.pair), "pair")
    if pair.layers is not None:
        pair = replace(pair, k=solver.k if solver is not None and isinstance(solver.k, int) else 1)
    logger = {**vars(conf.logger), "directory": conf.logger.directory or conf.paths.outputs}
    return {
        "pair": pair,
        "corpus": corpus,
        "calibration": built(CalibrationSpec, given, "calibration", **auto, selection_rows=rows),
        "logger": built(LoggerSpec, logger, "logger"),
        "outputs": Path(conf.paths.outputs).expanduser(),
        "force": conf.force,
        "verify": conf.verify,
    }


def _training(conf: Any) -> dict[str, Any]:
    if conf.corpus.num_shards != 1:
        raise KvxferError(
            f"corpus.num_shards={conf.corpus.num_shards}: only calibrate.py shares rows between processes; run it for "
            "every corpus.shard_index first (with the calibration settings that build_missing=false names here), then "
            "this without corpus.num_shards"
        )
    solver: Any
    solver, training = solver_of(conf)
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
    config = fit_config(solver)
    return {
        **_common(conf, solver),
        "solver": solver,
        "solver_config": config if training is None else training.config_on(config),
        "training": training,
        "build_missing": conf.build_missing,
    }


def calibrate(conf: Any) -> CalibrateSettings:
    return CalibrateSettings(**_common(conf))


def train(conf: Any) -> TrainSettings:
    return TrainSettings(**_training(conf))


def evaluate(
    conf: Any, domains: Sequence[Any] = (), parts: Mapping[str, EvaluateSettings | NotApplicable] | None = None
) -> EvaluateSettings:
    """Settings of ``evaluate.py``; ``domains`` and ``parts`` are what ``eval.domains`` and ``eval.parts`` name."""
    asked = dict(vars(conf.eval))
    kind = asked.pop("kind")
    cls = choice({"full": FullSpec, **KINDS}, kind, "eval.kind")
    spec = built(cls, asked, f"eval={asked['name']}")
    if isinstance(spec, QuestionsSpec) and spec.choices and conf.corpus.kind == "toy":
        raise NotApplicable(
            f"eval.choices={conf.eval.choices} asks which text follows, and corpus={conf.corpus.name} has questions of "
            "its own: use eval=mapped or eval=standard"
        )
    texts = tuple(built(CorpusSpec, vars(each), "corpus") for each in domains)
    plan = built(Plan, vars(conf.plan), "plan")
    if conf.map_dtype not in MAP_DTYPES:
        raise KvxferError(f"map_dtype={conf.map_dtype!r} is none of {', '.join(MAP_DTYPES)}")
    training = _training(conf)
    if conf.map is None and not training["pair"].random_weights:
        # A map that is named says itself what it has seen; of the config's own it is known before it is made.
        plan.require_seen(training["corpus"].skip_first)
    return EvaluateSettings(
        **training,
        plan=plan,
        eval=spec,
        map=conf.map,
        map_dtype=conf.map_dtype,
        domains=texts,
        parts=parts or {},
    )
