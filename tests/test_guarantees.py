"""The page of guarantees names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_promise_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = re.findall(r"^\| (?!promise|---)(.+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for promise, held in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", held)
        assert named, promise
        for file, test in named:
            tree = ast.parse((ROOT / file).read_text())
            tests = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
            assert test in tests if test else any(name.startswith("test_") for name in tests), f"{file}::{test}"
