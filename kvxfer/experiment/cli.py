"""The command line: compose a config, call a stage, and turn every mistake into one readable line."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import compose, config_directory, load_job, register, spelled_out, to_settings
from kvxfer.experiment.sweeps.jobs import Outcome, job_file
from kvxfer.maps.blocks import DEMO

log = logging.getLogger("kvxfer")
_begun = threading.Event()  # not kept in a task: workers are sent a copy of it


def calibrate() -> None:
    """Console script ``kvxfer-calibrate``."""
    main("calibrate")


def train() -> None:
    """Console script ``kvxfer-train``."""
    main("train")


def evaluate() -> None:
    """Console script ``kvxfer-evaluate``."""
    main("evaluate")


def demo() -> None:
    """Console script ``kvxfer-demo``: evaluate every design of a pair; takes the overrides of ``evaluate.py``."""

    def run() -> None:
        overrides = sys.argv[1:]
        if {"-h", "--help"} & set(overrides):
            print("kvxfer-demo [overrides of evaluate.py]: evaluate the designs " + ", ".join(DEMO))
            return
        configs = {name: compose("evaluate", [*overrides, f"features={name}"]) for name in DEMO}
        settings = {name: to_settings("evaluate", config) for name, config in configs.items()}
        _begun.set()
        for path in importlib.import_module("kvxfer.experiment.stages.compare").compare(settings):
            print(path)

    _guarded(run)


def main(stage: str) -> None:
    """Run a stage from the command line; exits with 1 and one line on a mistake in config or data.

    HYDRA_FULL_ERROR=1 shows tracebacks.
    """

    def run() -> None:
        register(stage)
        sys.argv[1:] = spelled_out(sys.argv[1:])
        task = Task(stage)
        hydra.main(version_base="1.3", config_path=str(config_directory()), config_name=stage)(task)()
        if task.failures:
            raise task.failures[0]

    _guarded(run)


def _guarded(run: Callable[[], None]) -> None:
    """Call ``run``; whatever goes wrong before a stage has begun is a mistake in the command."""
    set_up_logging()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra prints and exits by itself unless told to raise: raised errors can be told in one line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _begun.clear()
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted: give the same command again and it goes on from what is finished", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if wants_traceback or (_begun.is_set() and not _known(error)):
            raise
        sys.exit(f"error: {wrong_option(sys.argv[1:], error) or one_line(error)}")


@dataclass
class Task:
    """What Hydra calls for every job, in this process or, pickled, in a worker's."""

    stage: str
    failures: list[KvxferError] = field(default_factory=list)

    def __call__(self, cfg: DictConfig) -> Outcome | None:
        """Run the stage. A job of a sweep returns what became of it: one that fails must not end the others."""
        set_up_logging()
        _begun.set()
        job = HydraConfig.get()
        if job.mode == RunMode.MULTIRUN:
            return _sweep_job(self.stage, job)
        try:
            for path in _run(self.stage, cfg):
                print(path)
        except KvxferError as error:
            # Hydra would print a line of its own about an error that reaches it.
            self.failures.append(error)
        return None


def _sweep_job(stage: str, job: Any) -> Outcome:
    """One job, from the config that was checked; all jobs of a grid share a W&B group, also when it is run again."""
    home, number = Path(job.sweep.dir), job.job.num
    label, cfg = load_job(stage, job_file(home, number))
    log.info("job %d: %s", number, label)
    try:
        path = _run(stage, cfg, group=f"{job.job.config_name}-{home.name}")[-1]
    except Exception as error:
        log.error("job %d (%s) failed: %s", number, label, one_line(error), exc_info=not _known(error))
        return Outcome(error=one_line(error) if _known(error) else f"{type(error).__name__}: {one_line(error)}")
    return Outcome(run=str(path if path.is_dir() else path.parent))


def _run(stage: str, cfg: DictConfig, group: str | None = None) -> list[Path]:
    """The stage's paths; heavy imports happen here, so that --help is quick."""
    settings = to_settings(stage, cfg, group)
    # A sweep ends with a table of all its jobs; each one's own would bury it.
    quiet = {"show": False} if stage == "evaluate" and group is not None else {}
    result: Path | list[Path] = getattr(importlib.import_module(f"kvxfer.experiment.stages.{stage}"), stage)(
        settings, **quiet
    )
    return result if isinstance(result, list) else [result]


def _known(error: Exception) -> bool:
    """Whether an error is told well enough by its message."""
    return isinstance(error, KvxferError | HydraException | OmegaConfBaseException)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, and without Hydra's list of search paths."""
    text = str(error).split("Config search path:")[0]
    cause = error.__cause__
    from_hydra = isinstance(error, HydraException)
    if from_hydra and isinstance(cause, OmegaConfBaseException | HydraException) and str(cause) not in text:
        text += f": {str(cause).splitlines()[0]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("Available options")), None)
    if first is not None:
        lines = [*lines[:first], f"{lines[first]} {', '.join(lines[first + 1 :])}"]
    line = ". ".join(line.rstrip(".") for line in lines)
    # Hydra's hint would only make it swallow the typo.
    line = re.sub(r"\. To append to your (config|default list) use .*", ": no such key (--cfg job shows all)", line)
    return line or type(error).__name__


def wrong_option(arguments: list[str], error: BaseException) -> str | None:
    """What is wrong where Hydra refuses the type of an option's name (``rank=8``); its own message names no group."""
    if not str(error).startswith("Config group override must be a string"):
        return None
    for argument in arguments:
        group, _, value = argument.partition("=")
        options = sorted(file.stem for file in (config_directory() / group).glob("*.yaml")) if group else []
        if options and not set(value.split(",")) <= set(options):
            return f"{argument}: choose an option of {group!r}: {', '.join(options)}"
    return None


def set_up_logging() -> None:
    """Plain messages of this package on stderr; results go to stdout."""
    logger = logging.getLogger("kvxfer")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    # Of several processes that train together the first one speaks.
    logger.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.ERROR)
    logger.propagate = False
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="wandb")
