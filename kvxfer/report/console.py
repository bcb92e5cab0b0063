"""The last words of a command: what stdout can't take ends nothing, since all of it lies in files by then."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger("kvxfer")


def say(*things: Any, end: str = "\n") -> None:
    """Print texts and paths as lines (or with another ``end``), anything else as rich does; without things, what
    others have printed.

    A character that the terminal does not know is replaced. Who reads no further (``| head``) is left alone, and a
    disk that is full is told of once.
    """
    lenient()
    if sys.stdout is None:
        return
    try:
        for thing in things:
            if isinstance(thing, str | Path):
                print(thing, end=end)
            else:
                _print_rich(thing)
        sys.stdout.flush()
    except BrokenPipeError:
        _hush()
    except OSError as error:
        _hush()
        log.warning("standard output takes no more (%s); the files are complete", error.strerror)


def lenient() -> None:
    """From here on stdout replaces characters that it does not know."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_rich(thing: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the command."""
            raise BrokenPipeError

    Patient().print(thing, soft_wrap=isinstance(thing, Text))


def _hush() -> None:
    """What is said from here on, and what Python still holds back, goes nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        sys.stdout = io.StringIO()
