"""What W&B was told outside of this project: how quiet it is to be, and whether its agent started this process."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

MODES = ("online", "offline", "disabled")  # ever quieter
_OLD_NAMES = {"run": "online", "dryrun": "offline"}
_FALSE = ("", "0", "false", "no", "off", "n", "f")


def quieter(mode: str) -> str:
    """One of MODES: ``mode``, or what W&B was told outside where that is quieter. It never gets louder.

    WANDB_DISABLED switches off. Else WANDB_MODE counts, or where it is not set the settings file of the folder
    (``wandb offline`` and ``wandb disabled`` write it), or that of the user.
    """
    told = [mode]
    if os.environ.get("WANDB_DISABLED", "").strip().lower() not in _FALSE:
        told.append("disabled")
    asked = os.environ.get("WANDB_MODE") or _from_files() or mode
    asked = asked.strip().lower()
    told.append(_OLD_NAMES.get(asked, asked))
    return max((each for each in told if each in MODES), key=MODES.index)


def by_agent() -> bool:
    """Whether a W&B agent, of a sweep or of a queue, started this: every W&B run of the process gets its one id."""
    return any(os.environ.get(name) for name in ("WANDB_SWEEP_ID", "WANDB_LAUNCH"))


def _from_files() -> str | None:
    """``mode`` of W&B's settings files; those of the folder win."""
    root = Path(os.environ.get("WANDB_DIR") or ".").expanduser()
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    for folder in (root / (".wandb" if (root / ".wandb").exists() else "wandb"), home):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(folder / "settings", encoding="utf-8")
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # W&B takes a file that it can't read for an empty one
        if (found := parser.get("default", "mode", fallback=None)) is not None:
            return found
    return None
