"""The sweeper of kvxfer. Hydra takes sweepers from this namespace only; ``kvxfer.experiment.sweeps`` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from kvxfer.errors import KvxferError, files_of
from kvxfer.experiment.config import (
    job_config,
    plain,
    quoted,
    refuse_in_multirun,
    save_job,
    stage_of,
    to_settings,
    value_of,
)
from kvxfer.experiment.messages import one_line, wrong_option
from kvxfer.experiment.sweeps.composing import Composer
from kvxfer.experiment.sweeps.jobs import Job, Outcome, job_file, sweep_id
from kvxfer.experiment.sweeps.launching import run_all
from kvxfer.experiment.sweeps.skipping import read_skip, without_skipped

log = logging.getLogger("kvxfer")


class GridSweeper(BasicSweeper):
    """Hydra's grid sweeper, which looks before it leaps and tells at the end.

    Every job is composed and validated before the first one starts, and runs from the config that was validated, also
    when a YAML file is edited meanwhile. Any launcher may run the jobs. Parameters are those of the basic sweeper:
    ``params`` (the grid; what the command line gives wins) and ``max_batch_size``; and ``skip``, a list of combinations
    that are left out, each a mapping from swept keys to a value or a list of them.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        params: Mapping[str, Any] | None = None,
        skip: Sequence[Any] = (),
    ) -> None:
        super().__init__(max_batch_size, dict(params or {}))
        self.skip = skip

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what the jobs need; the task knows its stage."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.stage = str(task_function.stage)  # type: ignore[attr-defined]
        self.loader, self.base = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> Sequence[Sequence[JobReturn]]:
        """Check all jobs, run them, and sum them up; raises when any has failed."""
        assert self.launcher is not None
        batches = self._batches(arguments)
        jobs = self._composed([overrides for batch in batches for overrides in batch])
        identifier = sweep_id(self.stage, [plain(job.config) for job in jobs])
        home = Path(self.base.hydra.sweep.dir).expanduser() / identifier
        with files_of("paths.outputs", home):
            for job in jobs:
                save_job(job_file(home, job.number), job.label, job.config)
        swept = ", ".join(jobs[0].values) or "nothing"
        log.info("sweep %s: %d jobs over %s, all of them valid", identifier, len(jobs), swept)
        place = f"hydra.sweep.dir={quoted(str(home))}"
        returns: list[Sequence[JobReturn]] = []
        outcomes: list[Outcome] = []
        for batch in batches:
            ended = run_all(self.launcher.launch, [[*job, place] for job in batch], len(outcomes), home)
            returns.append([said for said, _ in ended if said is not None])
            outcomes += [outcome for _, outcome in ended]
        # matplotlib and rich are needed at the end only.
        from kvxfer.experiment.sweeps.summary import summarise

        summarise(self.stage, home, jobs, outcomes)
        return returns

    def _batches(self, arguments: list[str]) -> list[list[list[str]]]:
        parser = OverridesParser.create(config_loader=self.loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        batches = self.split_arguments(overrides, self.max_batch_size)
        return without_skipped(batches, read_skip(self.skip))

    def _composed(self, grid: list[list[str]]) -> list[Job]:
        """All jobs, or one error that names the first bad one."""
        swept = [column for column in range(len(grid[0])) if len({overrides[column] for overrides in grid}) > 1]
        composer = Composer(self.loader, partial(self.loader.load_sweep_config, self.base))
        jobs: list[Job] = []
        wrong: list[str] = []
        for number, overrides in enumerate(grid):
            changed = [overrides[column] for column in swept]
            try:
                jobs.append(self._job(number, composer.compose(overrides), changed))
            except Exception as error:
                label = f"job {number} ({' '.join(changed)})" if changed else f"job {number}"
                wrong.append(f"{label}: {wrong_option(changed, error) or one_line(error)}")
        if wrong:
            more = f" ({len(wrong) - 1} more of {len(grid)} jobs are wrong)" if len(wrong) > 1 else ""
            raise KvxferError(f"{wrong[0]}{more}; no job was started")
        return jobs

    def _job(self, number: int, composed: DictConfig, changed: list[str]) -> Job:
        HydraConfig.instance().set_config(composed)
        config = job_config(composed)
        if stage_of(config) != self.stage:
            raise KvxferError(f"this config is one of {stage_of(config)}.py and cannot be run by {self.stage}.py")
        refuse_in_multirun(to_settings(self.stage, config))
        pairs = [override.partition("=")[::2] for override in changed]
        return Job(number, {key: value_of(config, key, text) for key, text in pairs}, config)
