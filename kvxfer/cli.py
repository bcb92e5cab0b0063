"""The command line: compose a config, call a stage, and turn every mistake into one readable line."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvxfer.config import compose, config_directory, register, to_settings
from kvxfer.errors import KvxferError
from kvxfer.features import DEMO

log = logging.getLogger("kvxfer")


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

    def run(started: Callable[[], None]) -> None:
        overrides = sys.argv[1:]
        if {"-h", "--help"} & set(overrides):
            print("kvxfer-demo [overrides of evaluate.py]: evaluate the designs " + ", ".join(DEMO))
            return
        configs = {name: compose("evaluate", [*overrides, f"features={name}"]) for name in DEMO}
        settings = {name: to_settings("evaluate", config) for name, config in configs.items()}
        started()
        for path in importlib.import_module("kvxfer.stages.compare").compare(settings):
            print(path)

    _guarded(run)


def main(stage: str) -> None:
    """Run a stage from the command line; exits with 1 and one line on a mistake in config or data.

    HYDRA_FULL_ERROR=1 shows tracebacks.
    """

    def run(started: Callable[[], None]) -> None:
        register()
        jobs = 0
        failures: list[KvxferError] = []

        def task(cfg: DictConfig) -> None:
            nonlocal jobs
            started()
            jobs += 1
            try:
                _run(stage, cfg)
            except KvxferError as error:
                # Hydra would print a line of its own about an error that reaches it.
                failures.append(error)

        hydra.main(version_base="1.3", config_path=str(config_directory()), config_name=stage)(task)()
        if failures and jobs > 1:
            raise KvxferError(f"{len(failures)} of {jobs} jobs failed") from failures[0]
        if failures:
            raise failures[0]

    _guarded(run)


def _guarded(run: Callable[[Callable[[], None]], None]) -> None:
    """Call ``run``; whatever goes wrong before it says that it has started is a mistake in the command."""
    set_up_logging()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra prints and exits by itself unless told to raise: raised errors can be told in one line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    begun = threading.Event()
    try:
        run(begun.set)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        known = isinstance(error, KvxferError | HydraException | OmegaConfBaseException)
        if wants_traceback or (begun.is_set() and not known):
            raise
        sys.exit(f"error: {wrong_option(sys.argv[1:], error) or one_line(error)}")


def _run(stage: str, cfg: DictConfig) -> None:
    """One job: heavy imports happen here, so that --help is quick."""
    job = HydraConfig.get()
    try:
        settings = to_settings(stage, cfg, group=_group(job))
        module = importlib.import_module(f"kvxfer.stages.{stage}")
        result: Path | list[Path] = getattr(module, stage)(settings)
    except Exception as error:
        if job.mode == RunMode.MULTIRUN:
            log.error("job %s (%s) failed: %s", job.job.num, " ".join(job.overrides.task), one_line(error))
        raise
    for path in result if isinstance(result, list) else [result]:
        print(path)


def _group(job: Any) -> str | None:
    """All jobs of one sweep share a W&B group, also when the sweep is started again to go on."""
    if job.mode != RunMode.MULTIRUN:
        return None
    digest = hashlib.sha256("\n".join(sorted(sys.argv[1:])).encode()).hexdigest()[:8]
    return f"{job.job.config_name}-{digest}"


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, and without Hydra's list of search paths."""
    text = str(error).split("Config search path:")[0]
    cause = error.__cause__
    from_hydra = isinstance(error, HydraException)
    if from_hydra and isinstance(cause, OmegaConfBaseException | HydraException) and str(cause) not in text:
        text += f": {str(cause).splitlines()[0]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Available options" in text:
        first = next(i for i, line in enumerate(lines) if line.startswith("Available options"))
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
    logger.setLevel(logging.INFO)
    logger.propagate = False
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="wandb")
