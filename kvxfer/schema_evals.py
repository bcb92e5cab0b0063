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
    batch_size: int = 8
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


EVALS: dict[str, type[EvalConf]] = {"items": ItemsConf, "latency": LatencyConf, "perplexity": PerplexityConf}
