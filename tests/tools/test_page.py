"""The page's generated parts: made from committed results, and nothing else of it touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from kvxfer.errors import KvxferError
from kvxfer.report.numbers import NOTHING
from tests.collected import collected, make_map, write
from tools.results_page import page
from tools.results_page.__main__ import main
from tools.results_page.figures import frontier_figure
from tools.results_page.loading import load_results
from tools.results_page.tables import (
    best_table,
    calibration_table,
    features_table,
    front,
    frontier_table,
    maps_table,
    twins_table,
)

pytestmark = pytest.mark.draws

ROOT = Path(__file__).parents[2]
MINUS = "\N{MINUS SIGN}"
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "results"


def maps() -> list[dict[str, Any]]:
    """Plain ridge, one far better and dearer, one as good and cheaper, one worse than the source, other settings."""
    return [
        make_map(1.6, 0),
        make_map(1.25, 1, features="both", share=0.2),
        make_map(1.2, 2, features="both", rank="reduced", share=0.1),
        make_map(2.2, 3, solver="head_local", share=0.01),
        make_map(1.1, 4, features="both", lam=0.5, share=0.3),
        make_map(1.9, 5, rows=32, tokens=4000),
        make_map(1.0, 6, baseline="other"),
    ]


@pytest.fixture
def toy(tmp_path: Path):
    return load_results(write(tmp_path / "results", collected(maps(), ancestor_copy=1.5)))["toy"]


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]


def test_weighted_and_reduced_maps_are_compared_with_their_twins(tmp_path: Path) -> None:
    own = make_map(1.5, 9, solver="weighted"), make_map(1.3, 10, features="both", rank="reduced", r=0.5)
    pair = load_results(write(tmp_path, collected([*maps(), *own])))["toy"]
    _, _, weighted = cells(twins_table(pair, "weighted"))
    assert "features=same" in weighted[0]
    assert weighted[3] == "\N{MINUS SIGN}0.100"
    _, _, reduced = cells(twins_table(pair, "reduced"))
    assert "features=both" in reduced[0]
    assert [float(cell) for cell in reduced[1:3]] == [1.25, 1.2]
    assert reduced[-2:] == ["24.0 %", "14.0 %"], "whole handoffs"


def test_another_text_is_shown_apart(tmp_path: Path) -> None:
    folder = write(tmp_path, collected(maps()))
    other = collected([make_map(1.3, 20, baseline="c")], corpus="stdlib")
    (folder / "stdlib.json").write_text(json.dumps(other))
    found = load_results(folder)
    assert list(found) == ["toy", "toy/stdlib"]
    assert [len(each.maps) for each in found.values()] == [6, 1]


def test_designs_are_shown_with_what_they_cost(toy) -> None:
    header, _, same, both = cells(features_table(toy))
    assert (same[0], both[0]) == ("same", "both")
    assert same[header.index("Δ nats to same")] == NOTHING
    assert both[header.index("Δ nats to same")] == "\N{MINUS SIGN}0.350"
    assert (both[header.index("Handoff")], both[header.index("Map alone")]) == ("24.0 %", "20.0 %")
    assert (both[header.index("Bytes read")], both[header.index("Bytes written")]) == ("96", "128")


def test_a_penalty_per_block_is_compared_with_what_differs_in_nothing_else(tmp_path: Path) -> None:
    own = make_map(1.1, 9, features="both", share=0.2, per_block=True)
    pair = load_results(write(tmp_path, collected([*maps(), own])))["toy"]
    _, _, row = cells(twins_table(pair, "blocks"))
    assert "features=both" in row[0]
    assert [float(cell) for cell in row[1:3]] == [1.25, 1.1]
    assert own["runs"]["evaluate"] not in {one.data["runs"]["evaluate"] for one in pair.rows.values()}


def test_the_maps_are_ranked_with_the_baselines(toy) -> None:
    lines = maps_table(toy)
    header, _, *rows = cells(lines)
    assert header[:4] == ["Solver", "Penalty", "Rank", "Features"]
    assert [row[0] for row in rows[:1]] == ["**Target, own prefill**"]
    names = [" ".join(row[:4]) for row in rows]
    assert names.index("ridge isotropic full same") > names.index("ridge isotropic full both")
    assert sum(name.startswith(("ridge", "head_local")) for name in names) == 4
    source = next(row for row in rows if row[0] == "**Source alone**")
    assert source[header.index("Gap recovered (nats)")] == "0.0 %"
    # From no context (3.5) to the ceiling (1.0).
    assert source[header.index("Context recovered (nats)")] == "60.0 %"
    bare = next(row for row in rows if row[0] == "**No context**")
    assert bare[header.index("Context recovered (nats)")] == "0.0 %"
    assert bare[header.index("Gap recovered (nats)")] == f"{MINUS}150.0 %"
    best = rows[names.index("ridge isotropic full both")]
    assert best[header.index("Context recovered (nats)")] == "90.0 %"
    assert best[header.index("Handoff")] == "24.0 %"
    assert best[header.index("Δ nats")] == "\N{MINUS SIGN}0.350"
    assert best[header.index("Source")] == "better (p < 0.001)"
    assert best[header.index("Ancestors' copy")] == "better (p < 0.001)"
    assert rows[names.index("head_local isotropic full same")][header.index("Source")] == "worse (p < 0.001)"
    assert rows[names.index("ridge isotropic full same")][header.index("Ancestors' copy")] == "worse (p < 0.001)"
    assert lines[0].startswith("4 maps, k = 3, 80 items of 40 documents.")


def test_text_without_answers_has_no_accuracy(tmp_path: Path) -> None:
    data = collected([make_map(1.6, 0, answers=False), make_map(1.5, 1, answers=False, features="both")], answers=False)
    pair = load_results(write(tmp_path, data))["toy"]
    (header, *_) = cells(maps_table(pair))
    assert not [name for name in header if "ccuracy" in name or name == "Ancestors' copy"]
    for make in (frontier_table, calibration_table, best_table):
        assert make(pair)


def test_the_row_of_a_map_does_not_depend_on_its_score(tmp_path: Path) -> None:
    """Of several k the one that most maps have is shown, not the best."""
    usual = [make_map(1.6, number, features=name) for number, name in enumerate(("same", "both", "previous"))]
    pair = load_results(write(tmp_path, collected([*usual, make_map(1.1, 7, k=1)])))["toy"]
    assert pair.rows["ridge", "isotropic", "full", "same"].dial("solver", "k") == 3


def test_the_front_is_what_nothing_as_cheap_beats(toy) -> None:
    assert [one.share for one in front(toy)] == [0.01, 0.05, 0.1, 0.3]
    assert [one.handoff for one in front(toy)] == pytest.approx([0.05, 0.09, 0.14, 0.34])
    rows = cells(frontier_table(toy))
    assert rows[-1][0] == "`solver=ridge solver.k=3 penalty=isotropic penalty.lam=0.5 rank=full features=both`"


def test_the_best_and_the_cheapest_that_is_as_good(tmp_path: Path) -> None:
    """As good is what is shown to be within 0.01 nats: 0.002 with an error of 0.003 is, 0.012 is not."""
    near = [make_map(1.2, 1, features="both", share=0.2), make_map(1.202, 2, features="previous", share=0.1)]
    cheap = [make_map(1.212, 4, features="rich", share=0.05), make_map(1.4, 3, share=0.01)]
    pair = load_results(write(tmp_path, collected([*near, *cheap])))["toy"]
    header, _, best, cheapest = cells(best_table(pair))
    assert (best[0], cheapest[0]) == ("Best", "Cheapest that is as good")
    handoff, apart = (1 + header.index(name) for name in ("Handoff", "Nats above the best, 95 %"))  # the first is empty
    assert (best[handoff], cheapest[handoff]) == ("24.0 %", "14.0 %")
    low, high = json.loads(cheapest[apart].replace(MINUS, "-"))
    assert low < 0.002 < high < 0.01
    assert cheapest[-1].startswith("`python evaluate.py pair=toy eval=mapped solver=ridge ")
    assert cheapest[-1].endswith("features=previous`")


def test_calibrations_are_told_by_their_tokens(toy) -> None:
    header, _, *rows = cells(calibration_table(toy))
    same = [row for row in rows if row[0] == "same"]
    assert [row[header.index("Fit tokens")] for row in same] == ["4,000", "8,000"]
    assert [row[header.index("Tokens per column")] for row in same] == ["10.0", "20.0"]


def text_of(*tables: str) -> str:
    parts = [f"Before {name}.\n\n<!-- begin table: {name} -->\nold\n<!-- end table -->\n" for name in tables]
    return "# Results\n\n" + "\n".join(parts) + "\nLast words.\n"


def test_only_the_blocks_are_written(tmp_path: Path, capsys) -> None:
    names = ("maps toy", "frontier toy", "findings", "calibration toy", "best toy")
    (tmp_path / "docs").mkdir()
    file = tmp_path / "docs" / "results.md"
    file.write_text(text_of(*names))
    folder = write(tmp_path / "results", collected(maps()))
    main([str(folder), "--page", str(file)])
    assert Path(capsys.readouterr().out.splitlines()[-1]).resolve() == file.resolve()
    made = file.read_text()
    assert "old" not in made.splitlines()
    outside = re.sub(r"(<!-- begin .*? -->\n).*?(<!-- end)", r"\1old\n\2", made, flags=re.DOTALL)
    assert outside == text_of(*names)
    assert (tmp_path / "docs" / "figures" / "frontier_toy.png").read_bytes().startswith(b"\x89PNG")
    main([str(folder)])
    assert file.read_text() == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of("mops toy"), "table 'mops toy' is none of maps PAIR, features PAIR, frontier PAIR"),
        (text_of("maps other"), r"table 'maps other': no results of pair 'other' \(there are toy\)"),
        ("<!-- begin table: findings -->\n", "table 'findings' does not end"),
        ("<!-- begin table: findings -->\n<!-- begin table: best toy -->\n", "table 'best toy' begins in table"),
    ],
)
def test_a_wrong_block_is_told_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    folder, file = write(tmp_path / "results", collected(maps())), tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(SystemExit, match=f"error: {message}") as end:
        main([str(folder), "--page", str(file)])
    assert "\n" not in str(end.value)
    assert file.read_text() == text


def test_wrong_results_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(KvxferError, match=r"no JSON in .*: write some with python -m tools\.collect"):
        load_results(tmp_path)
    (tmp_path / "toy.json").write_text("{")
    with pytest.raises(KvxferError, match=r"toy\.json is no collected result"):
        load_results(tmp_path)
    (tmp_path / "toy.json").write_text(json.dumps({**collected(maps()), "schema": 9}))
    with pytest.raises(KvxferError, match=r"toy\.json: schema 9 is not 2: collect it again"):
        load_results(tmp_path)
    (tmp_path / "toy.json").write_text(json.dumps(collected([make_map(1.5, features="both")])))
    with pytest.raises(KvxferError, match="have no plain ridge to compare with"):
        maps_table(load_results(tmp_path)["toy"])


def test_maps_of_one_pair_may_stand_in_several_files(tmp_path: Path) -> None:
    write(tmp_path, collected([make_map(1.5, 1)]))
    other = collected([make_map(1.4, 2, features="both")])
    rounded = other["baselines"]["b"]["conditions"]["source"]
    rounded["nats"] = [nats + 0.001 for nats in rounded["nats"]]
    (tmp_path / "toy_wide.json").write_text(json.dumps(other))
    pair = load_results(tmp_path)["toy"]
    assert [one.name("features") for one in pair.maps] == ["same", "both"]
    assert pair.baseline.conditions["source"].nats[0] == pytest.approx(rounded["nats"][0] - 0.001), "the first file's"


def test_files_whose_baselines_differ_are_refused(tmp_path: Path) -> None:
    write(tmp_path, collected([make_map(1.5, 1)]))
    other = collected([make_map(1.4, 2, features="both")])
    file = tmp_path / "toy_wide.json"
    source = other["baselines"]["b"]["conditions"]["source"]
    source["nats"] = [nats + 0.1 for nats in source["nats"]]
    file.write_text(json.dumps(other))
    with pytest.raises(KvxferError, match=r"toy_wide\.json: source of baseline b differs by 0\.05 nats per token"):
        load_results(tmp_path)
    other["baselines"]["b"]["items"]["document"][0] = "another"
    file.write_text(json.dumps(other))
    with pytest.raises(KvxferError, match=r"toy_wide\.json: baseline b has other items"):
        load_results(tmp_path)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_results_are_of_clean_commits(file: Path) -> None:
    """What was measured can be made again: no file of the tree was another one than the commit's."""
    found = json.loads(file.read_text())
    commits = {each["commit"] for each in (*found["baselines"].values(), *found["maps"])}
    assert all(re.fullmatch(r"[0-9a-f]{12,40}", str(commit)) for commit in commits), commits


@pytest.mark.parametrize("name", ["results", "public-study"])
def test_the_page_is_made_from_the_committed_results(name: str, tmp_path: Path) -> None:
    text = PAGE.with_stem(name).read_text()
    assert page.blocks(text)
    if not list(RESULTS.glob("*.json")):
        pytest.skip("no results are committed")
    said = f"out of date: run python -m tools.results_page results/ --page docs/{name}.md"
    results = load_results(RESULTS)
    assert page.render(text, results) == text, said
    for pair, figure in page.figures(text).items():
        frontier_figure(results[pair], tmp_path / f"{pair}.png")
        with Image.open(PAGE.parent / figure) as committed, Image.open(tmp_path / f"{pair}.png") as made:
            # Another version of matplotlib may draw a letter otherwise; one point of many changes as little as that.
            if committed.info["Software"] == made.info["Software"]:
                assert ImageChops.difference(committed, made).getbbox(alpha_only=False) is None, said
