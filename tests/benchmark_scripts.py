"""Benchmarks as modules: they are scripts, and no part of a package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.launching import REPOSITORY


def load_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/<name>.py``, known under that name while the test runs."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", REPOSITORY / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
