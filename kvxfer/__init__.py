"""kvxfer: turn a small model's KV cache into a large one's, and measure honestly whether that is worth doing."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_SERVED = {"Handoff": "handoff.serving", "Policy": "handoff.policy", "Session": "handoff.session"}
"""What serves a map, imported when it is asked for: it brings torch and transformers, which commands may not need."""

_MOVED = {"corpus": "text.corpus", "loggers": "experiment.loggers", "runs": "experiment.runs"}
"""Modules that scripts import by the name that they had before there were rooms."""


class _Moved(ModuleType):
    """A module under its former name; it is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{__name__}.{_MOVED[self.__name__]}"), name)


def __getattr__(name: str) -> Any:
    if name not in _SERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SERVED[name]}"), name)


for _name in _MOVED:
    sys.modules[f"{__name__}.{_name}"] = _Moved(_name)
