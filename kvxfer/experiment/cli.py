"""``kvxfer COMMAND ...``: finds the command, and imports nothing before it is known which one is wanted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvxfer.report.console import say

COMMANDS = {
    "calibrate": ("kvxfer.experiment.command", "collect the moments of a pair"),
    "train": ("kvxfer.experiment.command", "fit or train a map from moments"),
    "evaluate": ("kvxfer.experiment.command", "measure what a map is worth"),
    "demo": ("kvxfer.experiment.command", "evaluate a pair under several designs, side by side"),
    "generate": ("kvxfer.experiment.generating", "answer a prompt over a cache that is handed over"),
    "report": ("kvxfer.report.command", "set finished evaluations side by side"),
}
"""Of every command the module that has a function of its name, and what it does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; exits with 1 and one line on a mistake."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        say(_help())
    elif name not in COMMANDS:
        sys.exit(f"error: {name!r} is no command of kvxfer; there are {', '.join(COMMANDS)}")
    else:
        getattr(importlib.import_module(COMMANDS[name][0]), name)(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(["usage: kvxfer COMMAND ...", "", *lines, "", "kvxfer COMMAND --help says what a command takes."])
