"""Another checkout of this project beside this one, in one process: before and after are then timed in turns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def modules_of(tree: Path, *names: str) -> list[Any]:
    """Modules of the package ``kvxfer`` of another checkout, which know nothing of this one's."""
    if not (tree / "kvxfer" / "__init__.py").is_file():
        raise SystemExit(f"--against {tree}: no checkout of this project")
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kvxfer"}
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, str(tree.resolve()))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvxfer"]:
            del sys.modules[name]
        sys.modules |= own
