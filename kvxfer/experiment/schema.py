"""The typed schema of every config group: what a key may hold. Plain dataclasses; ``config`` gives them to Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Union

from omegaconf import II, MISSING

from kvxfer.experiment.schema_evals import EvalConf

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
    random_weights: bool = False
    layers: int | None = None


@dataclass
class RowsConf:
    """``corpus.rows``."""

    fit: int = 512
    validation: int = 128
    held_out: int = 64
    evaluation: int = 64
    training: int = 512


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
    probe_rows: Number = "auto"
    probe_tokens: int = 256
    keep_layers: int | None = None
    selection_rows: int = 64
    weights: str = "auto"
    weight_clip: float = 10.0
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
    random_products: int | None = None
    source_hidden: bool | None = None


@dataclass
class SolverConf:
    """Group ``solver``."""

    name: str = MISSING
    k: Number = MISSING
    method: str = "topk"
    selection: str = "shared"
    selection_lam: Number = 1e-3
    criterion: str = "r2"
    pool: int = 6
    k_per: str = "pair"
    candidates: list[str] | None = None
    choose: str | None = None
    base: str | None = None
    base_map: str | None = None
    layers: list[int] | None = None
    attention: float | None = None
    kl: float | None = None
    mse: float | None = None
    queries: str | None = None
    carried: bool | None = None
    hidden: int | None = None
    activation: str | None = None
    depth: int | None = None
    share: bool | None = None
    delta_rank: int | None = None


@dataclass
class TrainerConf:
    """Group ``trainer``."""

    name: str = MISSING
    rows: str = "new"
    max_steps: int = 1000
    batch_size: int = 8
    lr: Optional[Number] = None  # noqa: UP045  (as above)
    weight_decay: float = 0.0
    warmup_steps: int = 50
    schedule: str = "cosine"
    gradient_clip: float = 1.0
    precision: str = "32-true"
    validate_every: int = 100
    patience: int | None = 5
    seed: int = 0
    cache_gib: float = 2.0
    devices: int = 1
    strategy: str = "auto"
    accelerator: str = "auto"
    ckpt_path: str | None = None


@dataclass
class PenaltyConf:
    """Group ``penalty``."""

    name: str = MISSING
    lam: Number = "auto"
    alpha: Number | None = None
    per_block: bool = False


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
    trainer: TrainerConf = field(default_factory=TrainerConf)
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
