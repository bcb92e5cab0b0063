"""What tests of sweeps share: where the grids are, and sweeps whose jobs are not run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from kvxfer.experiment.command import run
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
        run(stage)
    return str(end.value)
