"""What tests of commands share: where the grids are, commands in this process, and sweeps whose jobs are not run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from kvxfer.experiment import command as commands
from kvxfer.experiment.sweeps.jobs import Outcome

REPOSITORY = Path(__file__).parents[1]
SWEEPS = REPOSITORY / "sweeps"
PNG = b"\x89PNG"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Nothing runs: the overrides of the jobs that would have been launched."""
    jobs: list[list[str]] = []

    def launch(self: Launcher, overrides: Sequence[list[str]], initial_job_idx: int) -> list[JobReturn]:
        jobs.extend([list(job) for job in overrides])
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=Outcome(error="not run")) for _ in overrides]

    # Not the class as imported: Hydra's scan for plugins makes it anew.
    name = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    monkeypatch.setattr(Plugins.instance().class_name_to_class[name], "launch", launch)
    return jobs


def run_sweep(monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> str:
    """What a command ends with; every one here ends early."""
    monkeypatch.setattr(sys, "argv", [f"{stage}.py", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as end:
        commands.run(stage)
    return str(end.value)


@dataclass(frozen=True)
class Done:
    """What a command has left: its exit status and what it said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Done]]:
    """A command as a user gives it, in this process, so that its workers can be used again; training has no eval.

    Logging is set up anew by every command, and put back afterwards.
    """
    monkeypatch.chdir(REPOSITORY)
    ours, root = logging.getLogger("kvxfer"), logging.getLogger()
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (ours, root)]

    def run(stage: str, given: list[str], *arguments: str) -> Done:
        own = [item for item in given if stage == "evaluate" or not item.startswith("eval.")]
        monkeypatch.setattr(sys, "argv", [f"{stage}.py", *arguments, *own])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a command sets it
        ours.handlers = []
        capfd.readouterr()
        code: str | int | None = 0
        try:
            commands.run(stage)
        except SystemExit as end:
            code = end.code
        # Python prints a text that it is ended with, and exits with 1.
        said = capfd.readouterr()
        ended = f"{code}\n" if isinstance(code, str) else ""
        return Done(1 if ended else int(code or 0), said.out, said.err + ended)

    yield run
    for logger, logger.handlers, level, logger.propagate in before:
        logger.setLevel(level)
