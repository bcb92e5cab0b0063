"""Where a run's numbers go: files always, Weights & Biases as configured.

A logger is a record, never a part of the work: whatever W&B does, the run goes on, with one warning. Lineage does not
depend on it either (it cannot be read back offline); ``run.json`` beside each result holds that.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvxfer.errors import KvxferError
from kvxfer.experiment.runs import Run
from kvxfer.experiment.wandb_outside import MODES, by_agent, quieter
from kvxfer.files import write_json

logger = logging.getLogger("kvxfer")

Status = Literal["finished", "failed"]


@dataclass(frozen=True)
class LoggerSpec:
    """How a run is logged; the fields are the keys of ``configs/logger/*.yaml``.

    ``wandb`` is online, offline or disabled. ``tags`` come on top of what the stage gives; a ``group`` that is set here
    wins. W&B keeps its files in ``directory``/wandb (default: the run's own directory).
    """

    wandb: str = "offline"
    project: str = "kvxfer"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.wandb not in MODES:
            raise KvxferError(f"logger.wandb={self.wandb!r}: choose one of {', '.join(MODES)}")

    @property
    def mode(self) -> str:
        """``wandb``, or what W&B was told outside where that is quieter."""
        return quieter(self.wandb)

    @property
    def of_inputs(self) -> LoggerSpec:
        """How runs are logged that another one makes first: under a W&B agent to files alone.

        All W&B runs of an agent's process get one id, which is that of the run that was asked for.
        """
        return replace(self, wandb="disabled") if by_agent() else self


class RunLogger:
    """What a stage tells about itself: in the run's directory always, and to W&B once it is started.

    ``metrics.jsonl`` has one line a call, ``tables/<name>.csv`` is a table, and ``log.json`` has the config, what was
    logged beside numbers, and the status: running, finished or failed.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self._directory, self._file = directory, directory / "log.json"
        self._started = time.monotonic()
        self._log = {**_plain(about), "status": "running", "tables": [], "figures": {}, "artifacts": {}}
        self._wandb: WandbLogger | None = None
        self._warned = False
        directory.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self._log)

    def metrics(self, values: dict[str, Any], axis: str | None = None) -> None:
        """Numbers by name; ``axis`` is the key among them that the others are drawn over (a layer, a step)."""
        self._tell("metrics", lambda wandb: wandb.metrics(values, axis))
        with (self._directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(values), allow_nan=False) + "\n")

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A whole table; the same name again replaces it."""
        self._tell(f"table {name}", lambda wandb: wandb.table(name, columns, rows))
        path = self._directory / "tables" / f"{_safe(name)}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_plain(list(row)) for row in rows])
        if path.name not in self._log["tables"]:
            self._log["tables"].append(path.name)
        write_json(self._file, self._log)

    def figure(self, name: str, path: Path) -> None:
        """An image file."""
        self._tell(f"figure {name}", lambda wandb: wandb.figure(name, path))
        self._log["figures"][name] = self._relative(path)
        write_json(self._file, self._log)

    def artifact(self, name: str, type: str, paths: Sequence[Path], metadata: dict[str, Any]) -> None:
        """Files and folders that the run produced, with what describes them."""
        self._tell(f"artifact {name}", lambda wandb: wandb.artifact(name, type, paths, metadata))
        files = [self._relative(path) for path in paths]
        self._log["artifacts"][name] = {"type": type, "paths": files, "metadata": _plain(metadata)}
        write_json(self._file, self._log)

    def finish(self, status: Status) -> None:
        """The end: ``finished`` or ``failed``."""
        self._tell("finish", lambda wandb: wandb.finish(status))
        self._log |= {"status": status, "seconds": round(time.monotonic() - self._started, 1)}
        write_json(self._file, self._log)

    def start_wandb(self, start: Callable[[], WandbLogger]) -> None:
        """From here on W&B is told too; whatever goes wrong with it warns once, and the run goes on."""
        with self._forgiving("start"):
            self._wandb = start()

    def _tell(self, what: str, call: Callable[[WandbLogger], None]) -> None:
        if self._wandb is not None:
            with self._forgiving(what):
                call(self._wandb)

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
                logger.warning("W&B failed at %s (%s); the run goes on, its files are complete", what, reason)

    def _relative(self, path: Path) -> str:
        """A path that still holds after the run's directory has moved, if the file lies in it."""
        path, home = path.resolve(), self._directory.resolve()
        return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)


class WandbLogger:
    """One W&B run per job: a run that is still open is finished first, and no other is ever joined.

    ``about`` goes to ``wandb.init``: id, name, job_type, group, tags, config (set later, it misses an offline sync).
    Artifacts are copied to WANDB_DATA_DIR, so that ``wandb sync`` finds them after the run's directory has moved.
    """

    def __init__(self, spec: LoggerSpec, directory: Path, **about: Any) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        wandb.setup(settings=quiet)  # a missing API key is then an error; else it is a question that waits for ever
        directory.mkdir(parents=True, exist_ok=True)  # W&B takes a temporary directory where there is none
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            dir=str(directory),
            mode=spec.mode,  # type: ignore[arg-type]
            resume="allow" if spec.mode == "online" else None,
            reinit="finish_previous",
            settings=quiet,
            **about,
        )
        if spec.mode == "online":
            logger.info("W&B run: %s", self._run.url)
        self._drawn: set[str] = set()
        self._tables: dict[str, tuple[list[str], list[list[Any]]]] = {}

    def metrics(self, values: dict[str, Any], axis: str | None = None) -> None:
        # Never with W&B's own step: a step that is lower than the last one is dropped, silently.
        for key in set(values) - self._drawn - {axis} if axis else ():
            self._run.define_metric(key, step_metric=axis)
            self._drawn.add(key)
        self._run.log({key: _number(value) for key, value in values.items()})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        # Kept until the end: every table that is sent becomes an artifact of its own.
        self._tables[name] = (list(columns), [_plain(list(row)) for row in rows])

    def figure(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def artifact(self, name: str, type: str, paths: Sequence[Path], metadata: dict[str, Any]) -> None:
        import wandb

        artifact = wandb.Artifact(_safe(name), type=type, metadata=_plain(metadata))
        for path in paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    artifact.add_file(str(file), name=file.relative_to(path.parent).as_posix())
        self._run.log_artifact(artifact, aliases=["latest", _safe(self._run.id)])

    def finish(self, status: Status) -> None:
        import wandb

        try:
            for name, (columns, rows) in self._tables.items():
                self._run.log({name: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})
        finally:
            self._run.finish(exit_code=0 if status == "finished" else 1)


@contextmanager
def open_logger(
    spec: LoggerSpec, run: Run, columns: dict[str, Any], inputs: dict[str, str] | None = None
) -> Iterator[RunLogger]:
    """The logger of a run; an exception inside marks the run as failed and goes on.

    Close it before the run is committed, which moves its directory.

    Args:
        columns: flat ones (pair, solver, penalty, rank, features, ...), of which name, tags and group are made.
        inputs: the ids that are shown as the run's inputs, in place of its own.
    """
    shown = {"config": run.record["config"], "inputs": run.record["inputs"] if inputs is None else inputs}
    config = _plain({"stage": run.stage, "run_id": run.id, **columns, **shown})
    name, tags = label(columns)
    log = RunLogger(run.work, {"run_id": run.id, "stage": run.stage, "name": name, "config": config})
    if spec.mode != "disabled":
        about = {"id": run.id, "name": name, "job_type": run.stage, "config": config}
        about["group"] = spec.group or columns["pair"]
        # W&B refuses a longer one; a design of which much was changed has a long name.
        about["tags"] = sorted({*spec.tags, *(tag[:64] for tag in tags)})
        log.start_wandb(lambda: WandbLogger(spec, Path(spec.directory or run.work).expanduser(), **about))
    try:
        yield log
    except BaseException:
        # The work's own error must reach the user, not one about its record.
        with suppress(OSError):
            log.finish("failed")
        raise
    log.finish("finished")


def label(columns: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The name and the tags of a logged run: of a calibration, or about a map."""
    if "solver" not in columns:
        return f"{columns['pair']}/calibrate", (columns["pair"], columns["corpus"])
    name = f"{columns['pair']}/{columns['features']}-{columns['solver']}-{columns['penalty']}-{columns['rank']}"
    if "trainer_seed" in columns:
        name += f"-seed{columns['trainer_seed']}"
    return name, tuple(str(columns[key]) for key in ("pair", "solver", "penalty", "rank", "features"))


def _plain(value: Any) -> Any:
    """JSON types: scalars of arrays and tensors become numbers, what is not finite and what is unknown becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    value = _number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _number(value: Any) -> Any:
    """A scalar array or tensor as a Python number; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _safe(name: str) -> str:
    """A name that file systems and W&B both take."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
