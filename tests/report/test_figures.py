"""Figures are drawn, as large as promised, for every shape of input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from kvxfer.errors import KvxferError
from kvxfer.report.figures import conditions_figure
from kvxfer.report.fit_figures import curves_figure, r2_heatmap, training_figure

pytestmark = pytest.mark.draws

ROW = {"accuracy": 0.8, "accuracy_ci": [0.7, 0.9], "nats": 0.5, "nats_ci": [0.4, 0.7]}


def selection(targets: int, sources: int, k: int = 2) -> dict:
    draw = np.random.default_rng(0)
    grids = {f"r2_{kind}": draw.uniform(-0.5, 1, (targets, sources)).tolist() for kind in ("keys", "values")}
    chosen = [list(range(k)) for _ in range(targets)]
    return grids | {"chosen_keys": chosen, "chosen_values": chosen}


def drawn(path: Path) -> np.ndarray:
    image = imread(path)
    assert image.shape[1] > 400
    assert image[..., :3].min() < 0.5
    return image


@pytest.mark.parametrize(("targets", "sources", "k"), [(6, 3, 2), (1, 1, 1), (36, 28, 4), (64, 40, 8)])
def test_heat_maps_of_small_and_large_grids(tmp_path, targets, sources, k):
    r2_heatmap(selection(targets, sources, k), tmp_path / "r2.png")
    drawn(tmp_path / "r2.png")


def test_a_layer_without_a_score_is_left_grey(tmp_path):
    picked = selection(3, 2)
    picked["r2_keys"][1][0] = None
    r2_heatmap(picked, tmp_path / "r2.png")
    drawn(tmp_path / "r2.png")


def test_columns_are_the_candidates(tmp_path):
    """The chosen layers are marked in the columns that stand for them, not in those of their numbers."""
    picked = selection(2, 2) | {"candidates": [3, 7], "chosen_keys": [[3], [7]], "chosen_values": [[3], [7]]}
    r2_heatmap(picked, tmp_path / "r2.png")
    numbered = selection(2, 2) | {"chosen_keys": [[0], [1]], "chosen_values": [[0], [1]]}
    r2_heatmap(numbered, tmp_path / "numbered.png")
    ours, theirs = drawn(tmp_path / "r2.png"), drawn(tmp_path / "numbered.png")
    assert ours.shape == theirs.shape
    assert 0 < (ours != theirs).any(axis=-1).mean() < 0.01  # only the numbers below the columns differ


@pytest.mark.parametrize("grid", [[], [[0.1, 0.2], [0.3]]])
def test_a_grid_that_is_none_is_named(tmp_path, grid):
    with pytest.raises(KvxferError, match=r"selection\.r2_values"):
        r2_heatmap(selection(2, 2) | {"r2_values": grid}, tmp_path / "r2.png")


def test_conditions_in_accuracy(tmp_path):
    conditions = {name: ROW for name in ("floor", "mapped", "source", "ceiling", "something_new")}
    conditions_figure(conditions, tmp_path / "conditions.png", chance=0.25)
    drawn(tmp_path / "conditions.png")


@pytest.mark.parametrize("worst", [1.0, 400.0])
def test_conditions_in_nats_linear_and_logarithmic(tmp_path, worst):
    row = ROW | {"accuracy": None, "accuracy_ci": None}
    conditions = {"source": row, "mapped": row | {"nats_ci": None}, "floor": row | {"nats": worst, "nats_ci": None}}
    conditions_figure(conditions, tmp_path / "conditions.png")
    drawn(tmp_path / "conditions.png")


def test_names_label_rows_of_several_designs(tmp_path):
    rows = {"source": ROW, "mapped same": ROW, "mapped both": ROW}
    conditions_figure(rows, tmp_path / "a.png", 0.2, {"mapped same": "A design", "mapped both": "Another"})
    conditions_figure(rows, tmp_path / "b.png", 0.2)
    assert not np.array_equal(drawn(tmp_path / "a.png"), drawn(tmp_path / "b.png"))


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(KvxferError, match="none has an accuracy or nats"):
        conditions_figure({"mapped": {"accuracy": None, "nats": None}}, tmp_path / "conditions.png")


def test_drawing_leaves_the_global_style_alone(tmp_path):
    import matplotlib

    before = matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.edgecolor"]
    conditions_figure({"source": ROW}, tmp_path / "conditions.png")
    assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.edgecolor"]) == before


def test_every_dial_that_was_tried_is_a_panel(tmp_path):
    lams = [[lam, None, score] for lam, score in ((1e-4, 0.5), (1e-2, 0.7))]
    found = {"penalty": {"keys.0": lams, "values.0": lams}, "rank": {}, "k": [[1, 0.4], [2, 0.6]]}
    assert curves_figure(found, tmp_path / "curves.png")
    drawn(tmp_path / "curves.png")
    assert not curves_figure({"penalty": {}, "rank": {}, "k": [[1, 0.4]]}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_training_is_drawn_against_its_base(tmp_path):
    history = [{"step": step, "kl": 1 / step, "mse": 0.3, "val_kl": 0.5 / step} for step in (1, 2, 4)]
    training_figure(history, 0.4, tmp_path / "training.png")
    drawn(tmp_path / "training.png")
