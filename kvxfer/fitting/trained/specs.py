"""What is trained, on what objective, and how: settings of the trained solvers and of the trainer.

``kvxfer.text.spec`` says what a field's metadata may.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

from kvxfer.errors import KvxferError

QUERIES = ("prefix", "continuation", "both")
ACTIVATIONS = ("relu", "gelu")
PRECISIONS = ("32-true", "bf16-mixed")
SCHEDULES = ("cosine", "constant")
ROWS = ("new", "fit")


@dataclass(frozen=True)
class Trained:
    """A solver whose map is trained: what it adds to, or reads from, a closed-form base, and its objective.

    The loss is ``attention * A + kl * D + mse * E``. A is the error of the target's attention output, after its
    output projection, as a share of that output's variance, a mean over target layers. D is the divergence
    KL(target || mapped) of the next-token distributions of a continuation, in nats per token, when the target goes on
    over the mapped cache. E is the squared error of content as a share of its variance, a mean over layers and kinds.

    Args:
        name: the option's name.
        base: the closed form of the base, which is fitted with the run's own penalty, rank and features.
        base_map: the run id or the folder of the base in its place.
        layers: the target layers that are trained, the others keep the base's map; None: all.
        attention, kl, mse: the weights of the three terms (0: not computed).
        queries: whose queries A asks: those of the ``prefix`` (all of the row is mapped), of a ``continuation`` of the
            mapped prefix (whose own keys and values are the target's), or ``both`` (the mean of the two).
        carried: A's queries, and a continuation's own keys and values, come from the target's real forward over the
            mapped prefix, errors of earlier layers included, in place of its undisturbed ones (teacher forcing). It
            needs ``queries=continuation``.
    """

    name: str
    # Which map the base is, a run's input says.
    base: str = field(default="ridge", metadata={"id": False})
    base_map: str | None = field(default=None, metadata={"id": False})
    layers: tuple[int, ...] | None = None
    attention: float = 1.0
    kl: float = 0.0
    mse: float = 0.0
    queries: str = "continuation"
    carried: bool = False

    lr: ClassVar[float] = 1e-3
    """The peak learning rate where the trainer is given none."""

    def __post_init__(self) -> None:
        for key in ("attention", "kl", "mse"):
            value = getattr(self, key)
            if not math.isfinite(value) or value < 0:
                raise KvxferError(f"solver.{key}={value} must be 0 or more: it is the weight of a term of the loss")
        if not self.attention + self.kl + self.mse:
            raise KvxferError("solver.attention, solver.kl and solver.mse are all 0: nothing is left to train on")
        if self.queries not in QUERIES:
            raise KvxferError(f"solver.queries={self.queries!r}: choose one of {', '.join(QUERIES)}")
        if self.carried and self.queries != "continuation":
            raise KvxferError(
                "solver.carried=true asks the queries of the target's forward over the mapped prefix: "
                "set solver.queries=continuation"
            )
        if self.carried and not self.attention:
            raise KvxferError("solver.carried=true has no effect with solver.attention=0: give attention a weight")
        if self.layers is not None and (not self.layers or min(self.layers) < 0 or not _ascending(self.layers)):
            raise KvxferError(f"solver.layers={list(self.layers)} must be target layers from 0 on, ascending")
        if not self.attention:
            # Nobody's are asked: one question, whatever was said.
            object.__setattr__(self, "queries", "continuation")

    @property
    def follows(self) -> bool:
        """Whether the loss runs the target over the mapped prefix."""
        return self.kl > 0 or (self.carried and self.attention > 0)


@dataclass(frozen=True)
class Residual(Trained):
    """The frozen base plus, for every target layer and kind, a bottleneck ``act(x V + c) U`` with U = 0 at first.

    Args:
        hidden: the bottleneck's width.
        activation: ``gelu`` or ``relu``.
    """

    hidden: int = 64
    activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_network(self.hidden, self.activation)


@dataclass(frozen=True)
class MLP(Trained):
    """Hidden layers over the columns that the base reads, in place of it (arXiv 2608.03893: two of 1024, ReLU, MSE).

    Args:
        hidden: the width of every hidden layer.
        depth: how many there are.
        share: target layers and kinds that read the same columns share their hidden layers and have each a readout
            of their own.
    """

    hidden: int = 1024
    depth: int = 2
    share: bool = False
    activation: str = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_network(self.hidden, self.activation)
        if self.depth < 1:
            raise KvxferError(f"solver.depth={self.depth} must be 1 or more hidden layers")


@dataclass(frozen=True)
class Corrected(Trained):
    """The base with a trained change of its weights and biases, folded into one matrix when it is done.

    Args:
        delta_rank: the rank of the change of each weight; None: any.
    """

    delta_rank: int | None = None

    # A change is measured in units of the columns' number to the power of -1/2, and starts from a good map.
    lr: ClassVar[float] = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta_rank is not None and self.delta_rank < 1:
            raise KvxferError(f"solver.delta_rank={self.delta_rank} must be 1 or more, or null for a full change")


TRAINED: dict[str, type[Trained]] = {"residual": Residual, "mlp": MLP, "mlp_small": MLP, "corrected": Corrected}


@dataclass(frozen=True)
class TrainerSpec:
    """How a map is trained; the fields are the keys of ``configs/trainer/*.yaml``.

    Args:
        rows: ``new``: rows whose documents the corpus does not give to closed forms; ``fit``: the first rows of those
            that it does, where text is scarce.
        max_steps: optimiser steps.
        batch_size: rows of a step, over all devices.
        lr: the peak learning rate of AdamW; ``auto`` asks Lightning's finder first.
        weight_decay: of AdamW, decoupled.
        warmup_steps: steps over which the learning rate rises from 0.
        schedule: what follows: ``cosine`` (to 0 at ``max_steps``) or ``constant``.
        gradient_clip: the largest norm of the gradient; 0 for none.
        precision: ``32-true`` or ``bf16-mixed``.
        validate_every: steps between two looks at the validation rows, and between two checkpoints.
        patience: how many looks without a lower validation KL end the training; None: never.
        seed: of the initial weights and the order of rows.
        cache_gib: memory for the models' activations, three quarters for training rows and the rest for validation
            rows; rows beyond it are read again each time.
        devices: how many devices train; ``strategy`` is Lightning's name of how they share the work.
        accelerator: Lightning's; ``auto`` is where the pair is.
        ckpt_path: a checkpoint of this same question to go on from. A run that was killed finds its own.
    """

    name: str = field(default="default", metadata={"id": False})
    rows: str = "new"
    max_steps: int = 1000
    batch_size: int = 8
    lr: float | str = field(default=1e-3, metadata={"given": None})
    weight_decay: float = 0.0
    warmup_steps: int = 50
    schedule: str = "cosine"
    gradient_clip: float = 1.0
    precision: str = "32-true"
    validate_every: int = 100
    patience: int | None = 5
    seed: int = 0
    cache_gib: float = field(default=2.0, metadata={"id": False})
    devices: int = field(default=1, metadata={"id": False})
    strategy: str = field(default="auto", metadata={"id": False})
    accelerator: str = field(default="auto", metadata={"id": False})
    ckpt_path: str | None = field(default=None, metadata={"id": False})

    def __post_init__(self) -> None:
        for key in ("max_steps", "batch_size", "validate_every", "devices"):
            if getattr(self, key) < 1:
                raise KvxferError(f"trainer.{key}={getattr(self, key)} must be 1 or more")
        for key in ("weight_decay", "warmup_steps", "gradient_clip", "seed", "cache_gib"):
            if not math.isfinite(getattr(self, key)) or getattr(self, key) < 0:
                raise KvxferError(f"trainer.{key}={getattr(self, key)} must be 0 or more")
        if self.lr != "auto" and (isinstance(self.lr, str) or not (math.isfinite(self.lr) and self.lr > 0)):
            raise KvxferError(f"trainer.lr={self.lr} must be above 0, or auto")
        if self.patience is not None and self.patience < 1:
            raise KvxferError(f"trainer.patience={self.patience} must be 1 or more, or null to train to the end")
        if self.batch_size % self.devices:
            raise KvxferError(f"trainer.batch_size={self.batch_size} is no multiple of trainer.devices={self.devices}")
        for key, options in (("rows", ROWS), ("precision", PRECISIONS), ("schedule", SCHEDULES)):
            if getattr(self, key) not in options:
                raise KvxferError(f"trainer.{key}={getattr(self, key)!r}: choose one of {', '.join(options)}")


def _check_network(hidden: int, activation: str) -> None:
    if hidden < 1:
        raise KvxferError(f"solver.hidden={hidden} must be 1 or more")
    if activation not in ACTIVATIONS:
        raise KvxferError(f"solver.activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")


def _ascending(layers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(layers))
