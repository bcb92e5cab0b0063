"""What a criterion leaves to the best λ, and what a budget buys, where both are planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from tests.collected import collected, make_map, write
from tools.results_page.choosing import budget_table, criteria_table
from tools.results_page.data import PairResults
from tools.results_page.loading import load_results


def read(folder: Path, *maps: dict) -> PairResults:
    return load_results(write(folder, collected(list(maps))))["toy"]


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]


def test_a_criterion_is_set_against_the_best_lam_of_its_own_calibration(tmp_path: Path) -> None:
    much = [make_map(level, n, lam=10.0**-n) for n, level in enumerate((1.5, 1.3, 1.4))]
    much += [make_map(1.35, 4), make_map(1.3, 5, criterion="attention")]
    little = [make_map(level, 10 + n, lam=10.0**-n, rows=8, tokens=900) for n, level in enumerate((1.9, 1.8, 2.0))]
    little += [make_map(2.1, 14, rows=8, tokens=900), make_map(1.7, 15, rows=8, tokens=900, criterion="attention")]
    header, _, few, many = cells(criteria_table(read(tmp_path, *much, *little)))
    place = [header.index(name) for name in ("Fit tokens", "Best single λ", "Its nats")]
    assert [few[n] for n in place] == ["900", "0.1", "1.800"]
    assert [many[n] for n in place] == ["8,000", "0.1", "1.300"]
    r2, attention = (header.index(name) for name in ("R²", "attention outputs"))
    assert few[r2].startswith("+0.300 [0.2")
    assert few[attention].startswith("\N{MINUS SIGN}0.100 [")
    assert many[r2].startswith("+0.050 [")
    assert "next-token KL" not in header, "nothing was chosen by it"


def test_lams_without_a_criterion_beside_them_are_no_table(tmp_path: Path) -> None:
    maps = [make_map(1.5, n, lam=10.0**-n) for n in range(3)]
    with pytest.raises(KvxferError, match="criteria"):
        criteria_table(read(tmp_path, *maps, make_map(1.4, 4)))


def test_a_budget_buys_the_best_of_what_a_whole_handoff_costs(tmp_path: Path) -> None:
    # A handoff costs 4 % more than its map.
    cheap, dear = make_map(1.6, 0, share=0.05), make_map(1.3, 1, features="both", share=0.2)
    beyond = make_map(1.2, 2, features="previous", share=0.22)
    header, _, tenth, quarter = cells(budget_table(read(tmp_path, cheap, dear, beyond)))
    assert [row[:3] for row in (tenth, quarter)] == [
        ["10 %", "closed form", "9.0 %"],
        ["25 %", "closed form", "24.0 %"],
    ]
    assert "features=both" in quarter[header.index("Command")]
    with pytest.raises(KvxferError, match="25%"):
        budget_table(read(tmp_path / "dear", beyond))
