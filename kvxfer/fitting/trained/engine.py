"""Lightning's trainer as this project runs it: quiet, on the pair's device, and its learning rate finder."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.tuner.tuning import Tuner

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.module import TrainedModule
from kvxfer.fitting.trained.resuming import PlainFiles
from kvxfer.fitting.trained.specs import TrainerSpec
from kvxfer.models.pair import Pair

log = logging.getLogger("kvxfer")

_FINDER_STEPS, _FEWEST_FINDER_STEPS = 100, 20
FINDER_RATES = (1e-6, 0.3)

_MEANT = (
    ".*does not have many workers",
    "Checkpoint directory .* exists and is not empty",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)
"""Warnings of what is meant to be so, and of what Lightning does with torch."""


def make_trainer(
    spec: TrainerSpec, device: torch.device, work: Path, callbacks: list[L.Callback], **options: Any
) -> L.Trainer:
    """Lightning's trainer of these settings: quiet, without loggers and bars of its own.

    Raises:
        KvxferError: an accelerator, strategy or number of devices that is not to be had.
    """
    kind = {"cuda": "gpu"}.get(device.type, device.type)
    accelerator = kind if spec.accelerator == "auto" else spec.accelerator
    if (accelerator == "cpu") != (device.type == "cpu"):
        raise KvxferError(f"trainer.accelerator={accelerator}, but the pair is on {device}: set pair.device")
    alone = 1 if kind == "cpu" else [device.index or 0]
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=alone if spec.devices == 1 else spec.devices,
            strategy="ddp" if spec.devices > 1 and spec.strategy == "auto" else spec.strategy,
            precision=spec.precision,  # type: ignore[arg-type]
            max_steps=spec.max_steps,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            gradient_clip_val=spec.gradient_clip or None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=work,
            callbacks=callbacks,
            plugins=[PlainFiles()],
            **{"val_check_interval": spec.validate_every, **options},
        )
    except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
        raise KvxferError(
            f"trainer.accelerator={spec.accelerator}, trainer.devices={spec.devices}, "
            f"trainer.strategy={spec.strategy}: {str(error).strip().splitlines()[0]}"
        ) from error
    started = isinstance(getattr(trainer.strategy, "launcher", None), _MultiProcessingLauncher)
    if started or not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise KvxferError(
            f"trainer.strategy={spec.strategy}: what is trained must be whole in processes that are started from the "
            "command line; use auto or ddp"
        )
    return trainer


def find_rate(module: TrainedModule, spec: TrainerSpec, work: Path) -> float:
    """The learning rate that Lightning's finder suggests for a module, which is used up by it.

    Raises:
        KvxferError: it suggests none.
    """
    module.searching = True
    low, high = FINDER_RATES
    steps = min(_FINDER_STEPS, max(spec.max_steps, _FEWEST_FINDER_STEPS))
    # A look at the validation rows would tell it nothing.
    engine = make_trainer(spec, module.device, work, [], enable_checkpointing=False, val_check_interval=steps + 1)
    log.info("trainer.lr=auto: %d steps from a learning rate of %g up to %g, to choose one", steps, low, high)
    with _without_bar():
        found = Tuner(engine).lr_find(module, min_lr=low, max_lr=high, num_training=steps, update_attr=False)
    suggested = None if found is None else found.suggestion()
    if suggested is None:
        raise KvxferError("trainer.lr=auto: the finder suggests no learning rate on these rows; set trainer.lr")
    return float(suggested)


@contextmanager
def _without_bar() -> Iterator[None]:
    """The finder has a bar of its own, drawn where there is no terminal too, and no setting that does without."""
    module: Any = lr_finder
    bar = module.tqdm
    module.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar


def move(pair: Pair, device: torch.device) -> None:
    """Put both models where this process trains: each of several has a device of its own."""
    for model in (pair.source, pair.target):
        if model.device.type != device.type or (model.device.index or 0) != (device.index or 0):
            model.lm.to(device)
            model.device = device


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's own messages, and the warnings that say what is meant to be so."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in _MEANT:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
