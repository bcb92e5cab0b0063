"""Every kind of evaluation has a report, and whatever is shown of numbers is shown the same way."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from kvxfer.evals.kinds import KINDS
from kvxfer.report.kinds import REPORTS
from kvxfer.report.numbers import NOTHING
from kvxfer.report.prose import fill
from kvxfer.report.questions import narrow_table
from kvxfer.report.table import Table


def test_what_is_measured_can_be_told():
    assert set(REPORTS) == set(KINDS)
    assert [kind for kind, report in REPORTS.items() if not report.against_source] == [
        kind for kind, spec in KINDS.items() if spec.timed
    ]


def test_one_table_is_markdown_a_console_and_a_csv(tmp_path: Path):
    table = Table.of([1.5, None], ("Value|", lambda each: each), ("Twice", lambda each: each and 2 * each))
    assert str(table).splitlines() == ["| Value| | Twice |", "| :-- | --: |", "| 1.5 | 3.0 |", "| None | None |"]
    assert table.terminal().row_count == 2
    table.write_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["Value|", "Twice"], ["1.5", "3.0"], ["", ""]]


def test_columns_that_hold_nothing_are_left_out_but_of_a_csv(tmp_path: Path):
    table = Table(("A", "B", "C"), [("x", NOTHING, "1"), ("y", "", "2")])
    assert str(table).splitlines()[0] == "| A | C |"
    assert len(table.terminal().columns) == 2
    assert table.write_csv(tmp_path / "a.csv").read_text().splitlines()[0] == "A,B,C"


def test_a_template_says_what_it_lacks_and_joins_its_lines():
    with pytest.raises(UndefinedError, match="count"):
        fill("correlations", fewest=4)
    assert fill("correlations", count=1, fewest=4, table="").strip() == (
        "Too few maps (1): 4 maps of this pair need these diagnostics and an evaluation of items (as eval=standard)."
    )


def test_a_small_p_says_which_way():
    row = {"accuracy": 0.5, "accuracy_ci": [0.4, 0.6], "nats": 1.0, "nats_ci": [0.9, 1.1]}
    test = {"accuracy_p": 1e-4, "accuracy_difference": -0.2, "accuracy_ci": [-0.3, -0.1]}
    test |= {"nll_p": 1e-4, "nll_difference": -0.2, "nll_ci": [-0.3, -0.1]}
    data = {"conditions": {"mapped": row}, "tests": {"mapped_vs_source": test}}
    [(*_, accuracy, nats)] = narrow_table([("Mapped", data, "mapped")]).rows
    assert (accuracy, nats) == ("< 0.001, worse", "< 0.001")
