"""What evaluations can be asked: the settings of every kind, which the kinds themselves derive from.

Nothing here is heavy. ``kvxfer.text.spec`` says what a field's metadata may.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from kvxfer.errors import KvxferError, NotApplicable
from kvxfer.files import file_sha256

CONDITIONS = ("all", "mapped")
FEWEST_ROUNDS = 6  # fewer give no 95 % interval of a median
TOY_TASKS = ("toy_choices", "toy_answers")
_TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv")

SMALL, LARGE = "small", "large"
UP, DOWN = (SMALL, LARGE), (LARGE, SMALL)
PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {"up": (UP,), "down": (DOWN,), "ping_pong": (UP, DOWN)}
"""The directions, sender and receiver, that each pattern hands over in."""


@dataclass(frozen=True)
class EvaluationSpec:
    """The base of every evaluation's settings; the fields are the keys of its options in ``configs/eval``.

    ``kind`` is its name in ``kvxfer.evals.kinds``; ``version`` is raised whenever its numbers may change. One that is
    ``timed`` asks another question on another machine.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    timed: ClassVar[bool] = False

    name: str = field(metadata={"id": False})

    def at_least(self, **least: int) -> None:
        """Refuse a field below the least that it may be; None is allowed where a field may be it."""
        for key, lowest in least.items():
            if (value := getattr(self, key)) is not None and value < lowest:
                raise KvxferError(f"eval.{key}={value} must be {lowest} or more")

    def tokens_or_null(self, key: str, least: int) -> None:
        """Refuse a field that is neither None nor so many tokens."""
        if (value := getattr(self, key)) is not None and value < least:
            raise KvxferError(f"eval.{key}={value} must be {least} tokens or more, or null")


def _of_choices(key: str) -> dict[str, Any]:
    """Of a field that is read where it is asked which text follows."""
    return {"id": lambda asked: getattr(asked, key) if asked.choices else None}


@dataclass(frozen=True)
class QuestionsSpec(EvaluationSpec):
    """``eval=standard`` (all conditions), ``mapped`` (those of the mapped cache and its baselines) and ``choices``.

    Of the toy world ``questions`` about each of so many ``stories``; of text the rest of every row after ``prefix``
    tokens, or with ``choices`` which of so many continuations of ``answer`` tokens follows.
    """

    kind = "items"

    name: str = "standard"
    stories: int = 200
    questions: int = 5
    length: int | None = None
    prefix: int | None = None
    batch_size: int = 25
    generate: bool = True
    choices: int = 0
    answer: int = field(default=16, metadata=_of_choices("answer"))
    score_rest: bool = field(default=False, metadata=_of_choices("score_rest"))
    seed: int = 0
    conditions: str = "all"

    def __post_init__(self) -> None:
        if self.conditions not in CONDITIONS:
            raise KvxferError(f"eval.conditions={self.conditions!r} is neither 'all' nor 'mapped'")
        if self.choices and self.choices < 2:
            raise KvxferError(f"eval.choices={self.choices} must be 0 (no questions) or 2 or more continuations")
        if self.answer < 1:
            raise KvxferError(f"eval.answer={self.answer} must be 1 token or more")
        self.at_least(stories=2, questions=1, batch_size=2, seed=0)
        self.tokens_or_null("length", 8)
        self.tokens_or_null("prefix", 2)


@dataclass(frozen=True)
class PerplexitySpec(EvaluationSpec):
    """``eval=perplexity``: the same last ``scored`` tokens of each row after prefixes of several lengths.

    ``prefixes`` are in tokens; none means the length of the rows that the map was calibrated on, half of it, and eight
    times it, as far as models and texts allow. A forward pass holds as many rows as ``batch_tokens`` tokens make up,
    and one at least, so that memory does not grow with the prefix.
    """

    kind = "perplexity"
    version = 3  # 3: rows of one document each; no context, the ancestors' copy

    prefixes: tuple[int, ...] = ()
    scored: int = 64
    rows: int = 64
    domains: tuple[str, ...] = ()
    batch_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        self.at_least(scored=1, rows=2, batch_tokens=1, seed=0)
        if any(prefix < 2 for prefix in self.prefixes):
            raise KvxferError(f"eval.prefixes={list(self.prefixes)} must all be 2 tokens or more")
        if len(set(self.prefixes)) < len(self.prefixes):
            raise KvxferError(f"eval.prefixes={list(self.prefixes)} names a length twice")


@dataclass(frozen=True)
class DiagnosticsSpec(EvaluationSpec):
    """``eval=diagnostics``: rows of ``prefix`` mapped tokens and the ``scored`` tokens after them.

    ``prefix`` is in tokens; None means the length of the rows that the map was calibrated on. A forward pass holds as
    many rows as ``batch_tokens`` tokens make up, and one at least.
    """

    kind = "diagnostics"
    version = 3  # 3: rows of one document each; predictions of what costs no map

    prefix: int | None = None
    scored: int = 64
    rows: int = 32
    domains: tuple[str, ...] = ()
    batch_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        self.at_least(scored=1, rows=2, batch_tokens=1, seed=0)
        self.tokens_or_null("prefix", 2)


@dataclass(frozen=True)
class GenerationSpec(EvaluationSpec):
    """``eval=generation``: ``new_tokens`` written freely after every prompt, greedily and in ``samples`` samples.

    Prompts are ``questions`` about each of so many toy ``stories``, or ``prefix`` tokens (none: half of corpus.length)
    of so many ``rows`` of other text.
    """

    kind = "generation"

    stories: int = 60
    questions: int = 4
    rows: int = 64
    prefix: int | None = None
    new_tokens: int = 16
    samples: int = 3
    temperature: float = 1.0
    batch_size: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        self.at_least(stories=2, questions=1, rows=2, new_tokens=1, batch_size=1, samples=0, seed=0)
        if not 0 < self.temperature < float("inf"):
            raise KvxferError(f"eval.temperature={self.temperature} must be above 0 (greedy decoding is always there)")
        self.tokens_or_null("prefix", 2)


@dataclass(frozen=True)
class MultiturnSpec(EvaluationSpec):
    """``eval=multiturn``: at every turn the drift of the answering model from its own prefill, by pattern.

    ``stories`` are conversations of the toy world, ``rows`` those of other text; a turn has ``segment`` tokens of
    either. ``reverse_map`` is the map of the other direction (a run or its directory; none: the one that the run's
    settings give).
    """

    kind = "multiturn"

    turns: int = 6
    stories: int = 100
    rows: int = 32
    segment: int = 16
    patterns: tuple[str, ...] = tuple(PATTERNS)
    max_hops: int | None = None
    reverse_map: str | None = field(default=None, metadata={"id": False})  # the map is an input of the run
    batch_size: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        self.at_least(turns=2, stories=2, rows=2, segment=2, batch_size=1, seed=0)
        if self.max_hops is not None and self.max_hops < 0:
            raise KvxferError(f"eval.max_hops={self.max_hops} must be 0 or more, or null for no limit")
        if not self.patterns or not set(self.patterns) <= set(PATTERNS):
            raise KvxferError(f"eval.patterns={list(self.patterns)}: name one or more of {', '.join(PATTERNS)}")


def _content(asked: LatencySpec) -> str | None:
    """What the file holds, wherever it lies; a missing one is refused when it is read."""
    if asked.vllm is None or not (file := Path(asked.vllm).expanduser()).is_file():
        return asked.vllm
    return file_sha256(file)


@dataclass(frozen=True)
class LatencySpec(EvaluationSpec):
    """``eval=latency``: prompts of ``lengths`` tokens in batches of each of ``batch_sizes``, ``repeats`` rounds each.

    A round is the source's prefill, the handoff with a clock after every step, the handoff as a whole, and the target's
    own prefill to its first token: what is compared is measured side by side. ``acceptance``, ``handoffs``,
    ``handoffs_per_fit``, ``shadow_rate`` and ``bandwidth`` (GB/s, None: one device) are the formula's; ``fit_seconds``
    replaces what the map's runs recorded, and ``vllm`` names a file of ``benchmarks/vllm_prefill.py``.
    """

    kind = "latency"
    timed = True

    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 10
    warmup: int = 2
    acceptance: tuple[float, ...] = (1.0, 0.9, 0.7)
    handoffs: int = 1000
    handoffs_per_fit: int = 1000000
    shadow_rate: float = 0.0
    bandwidth: float | None = None
    fit_seconds: float | None = None
    vllm: str | None = field(default=None, metadata={"id": _content})
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("lengths", 2), ("batch_sizes", 1), ("acceptance", 0)):
            values = getattr(self, key)
            if not values or any(value < least for value in values):
                raise KvxferError(f"eval.{key}={list(values)} must hold one number or more, each {least} or more")
        if any(not 0 < share <= 1 for share in self.acceptance):
            raise KvxferError(f"eval.acceptance={list(self.acceptance)} must be shares above 0 and up to 1")
        self.at_least(repeats=FEWEST_ROUNDS, warmup=0, handoffs=1, handoffs_per_fit=1)
        if not 0 <= self.shadow_rate < 1:
            raise KvxferError(f"eval.shadow_rate={self.shadow_rate} must be a share from 0 to below 1")
        for key in ("bandwidth", "fit_seconds"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise KvxferError(f"eval.{key}={value} must be above 0 and finite, or null")


def harness_version() -> str:
    """The installed version; without the harness a NotApplicable that says how to install it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise NotApplicable('eval=lm_eval needs lm-evaluation-harness: pip install "kvxfer[eval]"')
    return metadata.version("lm_eval")


def _tasks(asked: BenchmarksSpec) -> dict[str, Any]:
    """Their names, in which harness, and what a folder of own ones holds, wherever it lies."""
    own = None if asked.folder is None else _digest(asked.folder)
    return {"names": asked.tasks, "harness": harness_version(), "own": own}


def _digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's task files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _TASK_FILES and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True)
class BenchmarksSpec(EvaluationSpec):
    """``eval=lm_eval``: tasks by the harness's names, each under all conditions on the same requests.

    ``limit`` keeps the first samples of every task; ``num_fewshot`` overrides what tasks set, as the harness does;
    ``include_path`` is a folder of further tasks; ``seed`` draws few-shot examples and sampled answers.
    """

    kind = "lm_eval"

    tasks: tuple[str, ...] = field(default=TOY_TASKS, metadata={"id": _tasks})
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    include_path: str | None = field(default=None, metadata={"id": False})
    log_samples: bool = True
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.tasks:
            raise KvxferError("eval.tasks is empty; name at least one task, as eval.tasks=[toy_choices]")
        twice = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        if twice:
            raise KvxferError(f"eval.tasks: {', '.join(twice)} is named twice; name every task once")
        self.at_least(limit=1, num_fewshot=0, batch_size=1, seed=0)
        if self.include_path is not None and self.folder is None:
            raise KvxferError(f"eval.include_path: no folder {self.include_path!r}; give a folder with tasks as YAML")

    @property
    def folder(self) -> Path | None:
        """The folder of further tasks, if there is one."""
        folder = None if self.include_path is None else Path(self.include_path).expanduser()
        return folder if folder is not None and folder.is_dir() else None


@dataclass(frozen=True)
class FullSpec(EvaluationSpec):
    """``eval=full``: ``parts`` are options of group ``eval``, in the order of the report."""

    kind = "full"

    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise KvxferError("eval.parts=[] names nothing to evaluate: name options of eval, e.g. [standard]")
        twice = sorted({part for part in self.parts if self.parts.count(part) > 1})
        if twice:
            raise KvxferError(f"eval.parts names {', '.join(twice)} twice")


# Of a kind of yours: its fields are its settings.

SPECS: dict[str, type[EvaluationSpec]] = {
    spec.kind: spec
    for spec in (
        QuestionsSpec,
        FullSpec,
        PerplexitySpec,
        DiagnosticsSpec,
        BenchmarksSpec,
        GenerationSpec,
        MultiturnSpec,
        LatencySpec,
    )
}
"""By the ``kind`` that an option names."""
