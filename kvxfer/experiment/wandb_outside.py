"""What W&B was told outside of this project: how quiet it is to be, and whether its agent started this process."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

MODES = ("online", "offline", "disabled")  # ever quieter
_OLD_NAMES = {"run": "online", "dryrun": "offline"}
_FALSE = ("", "0", "false", "no", "off", "n", "f")


def quieter(mode: str) -> str:
    """One of MODES: the quietest of ``mode`` and all that W&B was told outside. It never gets louder.

    That is WANDB_DISABLED, WANDB_MODE, and the settings file of the folder, which ``wandb offline`` and ``wandb
    disabled`` write, or where it says nothing that of the user.
    """
    asked = [mode, os.environ.get("WANDB_MODE", ""), _from_files()]
    if os.environ.get("WANDB_DISABLED", "").strip().lower() not in _FALSE:
        asked.append("disabled")
    known = [_OLD_NAMES.get(each, each) for each in (each.strip().lower() for each in asked)]
    return max((each for each in known if each in MODES), key=MODES.index)


def by_agent() -> bool:
    """Whether a W&B agent, of a sweep or of a queue, started this: every W&B run of the process gets its one id."""
    return any(os.environ.get(name) for name in ("WANDB_SWEEP_ID", "WANDB_LAUNCH"))


def _from_files() -> str:
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
    return ""
