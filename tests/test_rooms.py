"""No circle of files: beside what ``make lint`` checks of the rooms, packages count that import what lies in them."""

from __future__ import annotations

import importlib
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("kvxfer", exclude_type_checking_imports=False, cache_dir=None)
    found = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(found) > 100
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("former", "name", "module"),
    [
        ("runs", "environment", "experiment.runs"),
        ("corpus", "leading_bos", "text.corpus"),
        ("loggers", "LoggerSpec", "experiment.loggers"),
    ],
)
def test_what_scripts_import_is_found_under_its_former_name(former: str, name: str, module: str) -> None:
    given = getattr(importlib.import_module(f"kvxfer.{former}"), name)
    assert given is getattr(importlib.import_module(f"kvxfer.{module}"), name)
    with pytest.raises(ImportError, match="none_such"):
        exec(f"from kvxfer.{former} import none_such")
