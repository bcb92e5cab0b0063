"""The typed schema of every config, and the way from it to plain dataclasses. Nothing else knows OmegaConf."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING, DictConfig, OmegaConf, flag_override
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.stages.settings import CalibrateSettings, EvaluateSettings, TrainSettings

Number = Union[int, float, str]  # noqa: UP007  (OmegaConf reads this form only)


@dataclass
class ModelConf:
    """``pair.source`` and ``pair.target``."""

    model: str = MISSING
    revision: str = "main"
    drop_layers: list[int] = field(default_factory=list)


def _source() -> ModelConf:
    """``pair.source``: it drops what ``pair.drop_layers`` says, unless it says otherwise itself."""
    conf = ModelConf()
    conf.drop_layers = II("pair.drop_layers")
    return conf


@dataclass
class PairConf:
    """Group ``pair``."""

    name: str = MISSING
    drop_layers: list[int] = field(default_factory=list)
    source: ModelConf = field(default_factory=_source)
    target: ModelConf = field(default_factory=ModelConf)
    dtype: str = "bfloat16"
    device: str = "auto"
    attention: str = "sdpa"
    reverse: bool = False
    k: int = 4
    features: str = "same"


@dataclass
class RowsConf:
    """``corpus.rows``."""

    fit: int = 512
    validation: int = 128
    held_out: int = 64
    evaluation: int = 64


@dataclass
class CorpusConf:
    """Group ``corpus``."""

    name: str = MISSING
    kind: str = MISSING
    length: int = MISSING
    path: str | None = None
    glob: str = "**/*"
    column: str = "text"
    dataset: str | None = None
    subset: str | None = None
    revision: str | None = None
    document_tokens: int | None = None
    rows: RowsConf = field(default_factory=RowsConf)
    skip_first: int = 4
    num_shards: int = 1
    shard_index: int = 0
    seed: int = 0


@dataclass
class CalibrationConf:
    """Group ``calibration``."""

    features: str = "auto"
    layers: list[int] | None = None
    stride: int = 1
    batch_size: int = 8
    metrics: bool = True
    probe_rows: int = 0
    probe_tokens: int = 256
    max_bad_rows: float = 0.01
    checkpoint_minutes: float = 5.0


@dataclass
class FeaturesConf:
    """Group ``features``."""

    name: str = MISSING
    kinds: str | None = None
    previous: int | None = None
    target_embedding: int | None = None
    target_layer0: bool | None = None
    random_relu: int | None = None


@dataclass
class SolverConf:
    """Group ``solver``."""

    name: str = MISSING
    k: Number = MISSING
    method: str = "topk"
    selection: str = "shared"
    selection_lam: float = 1e-3
    criterion: str = "r2"
    pool: int = 6


@dataclass
class PenaltyConf:
    """Group ``penalty``."""

    name: str = MISSING
    lam: Number = "auto"
    alpha: Number | None = None


@dataclass
class RankConf:
    """Group ``rank``."""

    name: str = MISSING
    r: Number | None = None
    metric: Optional[str] = None  # noqa: UP045  (as the line above)


@dataclass
class PlanConf:
    """Group ``plan``."""

    name: str = MISSING
    exact_first: int = 4
    hold_back: int = 1


@dataclass
class EvalConf:
    """Group ``eval``."""

    name: str = MISSING
    stories: int = 200
    questions: int = 5
    length: int | None = None
    prefix: int | None = None
    batch_size: int = 25
    generate: bool = True
    seed: int = 0


@dataclass
class LoggerConf:
    """Group ``logger``."""

    wandb: str = "offline"
    project: str = "kvxfer"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    directory: str | None = None


@dataclass
class PathsConf:
    """``paths``."""

    outputs: str = "outputs"


@dataclass
class CalibrateConf:
    """``calibrate.py``."""

    pair: PairConf = field(default_factory=PairConf)
    corpus: CorpusConf = field(default_factory=CorpusConf)
    calibration: CalibrationConf = field(default_factory=CalibrationConf)
    logger: LoggerConf = field(default_factory=LoggerConf)
    paths: PathsConf = field(default_factory=PathsConf)
    force: bool = False


@dataclass
class TrainConf(CalibrateConf):
    """``train.py``."""

    features: FeaturesConf = field(default_factory=FeaturesConf)
    solver: SolverConf = field(default_factory=SolverConf)
    penalty: PenaltyConf = field(default_factory=PenaltyConf)
    rank: RankConf = field(default_factory=RankConf)
    build_missing: bool = True


@dataclass
class EvaluateConf(TrainConf):
    """``evaluate.py``."""

    plan: PlanConf = field(default_factory=PlanConf)
    eval: EvalConf = field(default_factory=EvalConf)
    map: str | None = None


SCHEMAS = {"calibrate": CalibrateConf, "train": TrainConf, "evaluate": EvaluateConf}


def register(stage: str | None = None) -> None:
    """Make the schemas known to Hydra under ``base_<stage>``, and the running command's config under ``stage``.

    A grid that builds on ``stage`` serves every command.
    """
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"base_{name}", node=schema)
    if stage is not None:
        store.store(name="stage", node={"defaults": [stage, "_self_"]})


def config_directory() -> Path:
    """Where the YAML options are: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def compose(stage: str, overrides: list[str]) -> DictConfig:
    """The config of a stage as its command line would compose it."""
    register()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        return hydra_compose(stage, overrides)


def _refuse_unknown_keys(conf: Any, prefix: str) -> None:
    """``+key=value`` adds keys that no schema has: they would be ignored, or break something far from here."""
    known = [item.name for item in fields(conf)]
    for key, value in vars(conf).items():
        if key not in known:
            raise KvxferError(f"{prefix}{key}: no such key; {prefix or 'the config '}has {', '.join(known)}")
        if is_dataclass(value):
            _refuse_unknown_keys(value, f"{prefix}{key}.")


def to_settings(
    stage: str, cfg: DictConfig, group: str | None = None
) -> CalibrateSettings | TrainSettings | EvaluateSettings:
    """Plain, validated settings of a composed config.

    Args:
        group: the W&B group of a multirun; ``logger.group`` wins over it.

    Raises:
        KvxferError: a value is missing or makes no sense; the message names its key.
    """
    from kvxfer.stages import settings

    try:
        conf: Any = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        raise KvxferError(f"{error.full_key} is not set: give it a value with {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise KvxferError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    if not isinstance(conf, SCHEMAS[stage]):
        raise KvxferError(f"the config (-cn) is not one of the {stage} stage: choose one that builds on {stage}")
    _refuse_unknown_keys(conf, "")
    if conf.logger.group is None:
        conf.logger.group = group
    build = {"calibrate": settings.calibrate, "train": settings.train, "evaluate": settings.evaluate}
    return build[stage](conf)


def job_config(cfg: DictConfig) -> DictConfig:
    """A composed config without Hydra's own part, every value resolved."""
    result = copy.deepcopy(cfg)
    with flag_override(result, ["struct", "readonly"], False):
        result.pop("hydra", None)
    OmegaConf.resolve(result)
    return result


def stage_of(cfg: DictConfig) -> str | None:
    """The stage whose schema a config has."""
    schema = OmegaConf.get_type(cfg)
    return next((stage for stage, known in SCHEMAS.items() if known is schema), None)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as plain dicts and lists."""
    result: Any = OmegaConf.to_container(cfg, resolve=True)
    return result


def value_of(cfg: DictConfig, key: str, text: str) -> bool | int | float | str | None:
    """The value of an override's key in the config that it was composed into; of a group, the option's name."""
    value = OmegaConf.select(cfg, key.lstrip("+"), default=text)
    return value if value is None or isinstance(value, bool | int | float | str) else text


def save_job(file: Path, label: str, cfg: DictConfig) -> None:
    """Keep the config of a sweep's job under its label."""
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create({"job": label, "config": plain(cfg)}), file)


def load_job(stage: str, file: Path) -> tuple[str, DictConfig]:
    """The label and the config of a sweep's job, typed as the stage's schema."""
    saved = OmegaConf.load(file)
    config = OmegaConf.merge(OmegaConf.structured(SCHEMAS[stage]), saved.config)
    assert isinstance(config, DictConfig)
    return str(saved.job), config
