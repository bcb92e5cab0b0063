"""The commands that Hydra composes the config of: the stages, and the demo."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from kvxfer.experiment.config import compose, config_directory, load_job, register, spelled_out, to_settings
from kvxfer.experiment.messages import badly_quoted, one_line, set_up_logging, well_told, wrong_option
from kvxfer.experiment.sweeps.jobs import Outcome, job_file
from kvxfer.experiment.sweeps.launching import tell
from kvxfer.maps.blocks import DEMO
from kvxfer.report.console import lenient, say

log = logging.getLogger("kvxfer")
_begun = threading.Event()  # not kept in a task: workers are sent a copy of it


def run(stage: str, arguments: Sequence[str] | None = None) -> None:
    """Run a stage; exits with 1 and one line on a mistake in config or data. HYDRA_FULL_ERROR=1 shows tracebacks.

    Args:
        arguments: what follows the name of the subcommand; the command line's own if the stage is the program.
    """
    typed = sys.argv
    program, given = (typed[0], typed[1:]) if arguments is None else (f"kvxfer {stage}", arguments)
    with _mistakes_in_one_line(given):
        register(stage)
        task = Task(stage, typed)
        sys.argv = [program, *spelled_out(given)]  # where Hydra looks
        try:
            hydra.main(version_base="1.3", config_path=str(config_directory()), config_name=stage)(task)()
        finally:
            sys.argv = typed
        if task.failures:
            raise task.failures[0]


calibrate, train, evaluate = (partial(run, stage) for stage in ("calibrate", "train", "evaluate"))


def demo(overrides: Sequence[str]) -> None:
    """Evaluate every design of a pair; takes the overrides of ``evaluate``."""
    if {"-h", "--help"} & set(overrides):
        say("kvxfer demo [overrides of evaluate]: evaluate the designs " + ", ".join(DEMO))
        return
    with _mistakes_in_one_line(overrides):
        configs = {name: compose("evaluate", [*overrides, f"features={name}"]) for name in DEMO}
        settings = {name: to_settings("evaluate", config) for name, config in configs.items()}
        _begun.set()
        say(*importlib.import_module("kvxfer.experiment.stages.compare").compare(settings))


@contextmanager
def _mistakes_in_one_line(arguments: Sequence[str]) -> Iterator[None]:
    """Whatever goes wrong before a stage has begun is a mistake in the command."""
    set_up_logging()
    lenient()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra prints and exits by itself unless told to raise: raised errors can be told in one line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _begun.clear()
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: give the same command again and it goes on from what is finished", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if wants_traceback or (_begun.is_set() and not well_told(error)):
            raise
        sys.exit(f"error: {wrong_option(arguments, error) or badly_quoted(error) or one_line(error)}")
    finally:
        # Hydra's own words (--help, --cfg) may be read no further either.
        say()


@dataclass
class Task:
    """What Hydra calls for every job, in this process or, pickled, in a worker's.

    Attributes:
        command: the command line as it was typed. Processes that train together are started by giving it again.
    """

    stage: str
    command: list[str]
    failures: list[Exception] = field(default_factory=list)

    def __call__(self, cfg: DictConfig) -> Outcome | None:
        """Run the stage. A job of a sweep returns what became of it: one that fails must not end the others."""
        set_up_logging()
        _begun.set()
        sys.argv = self.command
        job = HydraConfig.get()
        if job.job.chdir:
            # Paths are those of the folder that the command was given in; runs have folders of their own anyway.
            os.chdir(job.runtime.cwd)
        if job.mode == RunMode.MULTIRUN:
            return _sweep_job(self.stage, job)
        try:
            say(*_run(self.stage, cfg))
        except Exception as error:
            if not well_told(error):
                raise
            # Hydra would print a line of its own about an error that reaches it.
            self.failures.append(error)
        return None


def _sweep_job(stage: str, job: Any) -> Outcome:
    """One job, from the config that was checked; all jobs of a grid share a W&B group, also when it is run again."""
    home, number = Path(job.sweep.dir).expanduser(), job.job.num
    tell(home, number, None)
    label = ""
    try:
        label, cfg = load_job(stage, job_file(home, number))
        log.info("job %d: %s", number, label)
        path = _run(stage, cfg, group=f"{job.job.config_name}-{home.name}")[-1]
        outcome = Outcome(run=str(path if path.is_dir() else path.parent))
    except Exception as error:
        known = well_told(error)
        log.error("job %d (%s) failed: %s", number, label, one_line(error), exc_info=not known)
        outcome = Outcome(error=one_line(error) if known else f"{type(error).__name__}: {one_line(error)}")
    tell(home, number, outcome)
    return outcome


def _run(stage: str, cfg: DictConfig, group: str | None = None) -> list[Path]:
    """The stage's paths; heavy imports happen here, so that --help is quick."""
    settings = to_settings(stage, cfg, group)
    # A sweep ends with a table of all its jobs; each one's own would bury it.
    quiet = {"show": False} if stage == "evaluate" and group is not None else {}
    result: Path | list[Path] = getattr(importlib.import_module(f"kvxfer.experiment.stages.{stage}"), stage)(
        settings, **quiet
    )
    return result if isinstance(result, list) else [result]
