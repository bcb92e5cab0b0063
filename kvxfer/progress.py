"""Progress for people: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

log = logging.getLogger("kvxfer")

_LINE_SECONDS = 15.0


class _Rate(ProgressColumn):
    """Units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The rate, once there is one."""
        return Text(f"{task.speed:,.0f} {self.unit}/s" if task.speed else "")


@contextmanager
def progress(title: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``. A resumed job starts at ``done``, which does not count towards its speed."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, _Rate(unit), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(title, total=total, completed=done)

            def step(n: int) -> None:
                bar.advance(task, n)

            yield step
        return
    started = said = time.monotonic()
    position = done

    def advance(n: int = 1) -> None:
        nonlocal position, said
        position += n
        now = time.monotonic()
        if now - said >= _LINE_SECONDS:
            said = now
            rate = (position - done) / (now - started)
            left = (total - position) / rate
            log.info("%s: %.0f %% (%s %s/s, %.0f s left)", title, 100 * position / total, f"{rate:,.0f}", unit, left)

    yield advance
    log.info("%s: done, %s %s in %.1f s", title, f"{position - done:,}", unit, time.monotonic() - started)
