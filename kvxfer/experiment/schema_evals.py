"""The typed schema of group ``eval``: one dataclass for each kind of evaluation, which its options build on."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class EvalConf:
    """What every option has: its name, and which evaluation it sets (``kvxfer.evals.kinds``)."""

    name: str = MISSING
    kind: str = MISSING


@dataclass
class ItemsConf(EvalConf):
    """``eval.kind=items``."""

    stories: int = 200
    questions: int = 5
    length: int | None = None
    prefix: int | None = None
    batch_size: int = 25
    generate: bool = True
    choices: int = 0
    answer: int = 16
    score_rest: bool = False
    seed: int = 0
    conditions: str = "all"


@dataclass
class PerplexityConf(EvalConf):
    """``eval.kind=perplexity``."""

    prefixes: list[int] = field(default_factory=list)
    scored: int = 64
    rows: int = 64
    domains: list[str] = field(default_factory=list)
    batch_tokens: int = 8192
    seed: int = 0


@dataclass
class FullConf(EvalConf):
    """``eval.kind=full``."""

    parts: list[str] = field(default_factory=list)


@dataclass
class LmEvalConf(EvalConf):
    """``eval.kind=lm_eval``."""

    tasks: list[str] = field(default_factory=list)
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    include_path: str | None = None
    log_samples: bool = True
    seed: int = 1234


@dataclass
class DiagnosticsConf(EvalConf):
    """``eval.kind=diagnostics``."""

    prefix: int | None = None
    scored: int = 64
    rows: int = 32
    domains: list[str] = field(default_factory=list)
    batch_tokens: int = 4096
    seed: int = 0


@dataclass
class GenerationConf(EvalConf):
    """``eval.kind=generation``."""

    stories: int = 60
    questions: int = 4
    rows: int = 64
    prefix: int | None = None
    new_tokens: int = 16
    samples: int = 3
    temperature: float = 1.0
    batch_size: int = 40
    seed: int = 0


@dataclass
class MultiturnConf(EvalConf):
    """``eval.kind=multiturn``."""

    turns: int = 6
    stories: int = 100
    rows: int = 32
    segment: int = 16
    patterns: list[str] = field(default_factory=list)
    max_hops: int | None = None
    reverse_map: str | None = None
    batch_size: int = 25
    seed: int = 0


@dataclass
class LatencyConf(EvalConf):
    """``eval.kind=latency``."""

    lengths: list[int] = field(default_factory=lambda: [128, 256, 512, 1024])
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    repeats: int = 10
    warmup: int = 2
    acceptance: list[float] = field(default_factory=lambda: [1.0, 0.9, 0.7])
    handoffs: int = 1000
    handoffs_per_fit: int = 1000000
    shadow_rate: float = 0.0
    bandwidth: float | None = None
    fit_seconds: float | None = None
    vllm: str | None = None
    seed: int = 0


EVALS: dict[str, type[EvalConf]] = {
    "items": ItemsConf,
    "full": FullConf,
    "perplexity": PerplexityConf,
    "diagnostics": DiagnosticsConf,
    "lm_eval": LmEvalConf,
    "generation": GenerationConf,
    "multiturn": MultiturnConf,
    "latency": LatencyConf,
}
