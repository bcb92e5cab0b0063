"""Random features: drawn once, kept with the calibration, and the same in all shares and every map."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages import calibrate as calibrate_stage
from kvxfer.experiment.stages.calibrate import calibrate
from kvxfer.experiment.stages.fit import find_calibration
from kvxfer.experiment.stages.train import train
from kvxfer.files import RECORD, read_json, write_json
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS, RANDOM, Block, Features
from kvxfer.maps.random_features import RandomProducts, RandomRelu, random_columns
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import layout_for
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.random_file import RANDOM_FILE, draw_random, keep_random, load_random, merge_random
from kvxfer.moments.spec import CalibrationSpec
from tests.calibrations import SPLIT_FILES, make_settings
from tests.samples import assert_same
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models

BOTH = Features("r", random_relu=4, random_products=3)


def layout_of(features: Features, layers: int = 2, width: int = 6) -> Layout:
    return Layout.of(features, list(range(layers)), 2, width, 2, {kind: getattr(features, kind) for kind in RANDOM})


def test_a_draw_is_a_function_of_layers_and_widths(tiny_pair: Pair) -> None:
    layout = layout_for(tiny_pair, CalibrationSpec(features=DESIGNS["products"], layers=(1,)))
    one, two = draw_random(layout), draw_random(layout)
    assert one is not None
    assert two is not None
    assert one.layers == (1,)
    assert one.widths == {"random_products": 1500}
    for name, tensor in one.tensors().items():
        assert tensor.shape == (2 * layout.width, 1500)
        assert torch.equal(tensor, two.tensors()[name])
    assert draw_random(layout_for(tiny_pair, CalibrationSpec())) is None


def test_relu_features_by_hand() -> None:
    relu = RandomRelu(torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([0.5, 1.0]))
    assert relu(torch.tensor([[1.0, 2.0], [-3.0, 1.0]])).tolist() == [[5.5, 0.0], [0.0, 4.0]]
    # Four weights at two, two biases at one.
    assert relu.flops == 10


def test_products_by_hand() -> None:
    products = RandomProducts(torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, 1.0]]))
    # (1 + 4) * 6 and -1 * 3; (-3 + 2) * 3 and 3 * -2.
    assert products(torch.tensor([[1.0, 2.0], [-3.0, 1.0]])).tolist() == [[30.0, -3.0], [-3.0, -6.0]]
    # Eight weights at two, two products at one.
    assert products.flops == 18


@pytest.mark.parametrize("kind", ["random_relu", "random_products"])
def test_a_layer_s_scale_says_nothing(kind: str) -> None:
    random = draw_random(layout_of(BOTH))
    generator = torch.Generator().manual_seed(0)
    content = {Block(n, k): torch.randn(5, 6, generator=generator) for n in range(2) for k in KINDS}

    def of(scale: float) -> torch.Tensor:
        return random_columns(random, Block(0, kind), lambda b: content[b] * (scale if b == Block(1, "keys") else 1))

    assert of(1).shape == (5, getattr(BOTH, kind))
    assert torch.allclose(of(100), of(1), atol=1e-5)
    assert not torch.allclose(of(-1), of(1), atol=1e-2)


def test_what_is_kept_comes_back_and_is_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, path = layout_of(BOTH), tmp_path / RANDOM_FILE
    kept = keep_random(layout, path)
    assert kept is not None
    # Another torch: it draws other numbers.
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape))
    for found in (load_random(layout, path), keep_random(layout, path)):
        assert found is not None
        assert found.layers == (0, 1)
        assert all(torch.equal(tensor, kept.tensors()[name]) for name, tensor in found.tensors().items())
    assert kept.only({"keys"}) is None
    assert (part := kept.only({"random_products", "keys"})) is not None
    assert part.widths == {"random_products": 3}


def test_a_layout_without_them_has_no_file(tmp_path: Path) -> None:
    layout, path = layout_of(Features("plain")), tmp_path / RANDOM_FILE
    assert keep_random(layout, path) is None
    assert load_random(layout, path) is None
    assert not path.exists()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layout, path = layout_of(BOTH), tmp_path / RANDOM_FILE
    again = r"calibrate again \(calibrate\.py with force=true\)$"
    with pytest.raises(KvxferError, match=f"is missing, .*{again}"):
        load_random(layout, path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(KvxferError, match=f"is not readable .*{again}"):
        load_random(layout, path)
    for other in (layout_of(BOTH, layers=3), layout_of(Features("r", random_relu=5, random_products=3))):
        path.unlink()
        keep_random(other, path)
        with pytest.raises(KvxferError, match=f"other random features .*{again}"):
            load_random(layout, path)
    tensors = load_file(path)
    for name in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
        with pytest.raises(KvxferError, match=f"other random features .*{again}"):
            load_random(layout, path)


def test_shares_must_agree(tmp_path: Path) -> None:
    shares = [tmp_path / f"{n}.safetensors" for n in range(3)]
    layout, path = layout_of(BOTH), tmp_path / RANDOM_FILE
    for share in shares[:2]:
        keep_random(layout, share)
    with pytest.raises(KvxferError, match=r"2\.safetensors is missing"):
        merge_random(shares, path)
    tensors = load_file(shares[0])
    save_file({**tensors, "relu.bias": tensors["relu.bias"] + 1}, shares[2])
    with pytest.raises(KvxferError, match=r"2\.safetensors is not the same as .*one version of torch and force=true"):
        merge_random(shares, path)
    assert not path.exists()
    save_file(tensors, shares[2])
    merge_random(shares, path)
    assert path.read_bytes() == shares[0].read_bytes()


@pytest.fixture
def overrides(tiny_folders: tuple[Path, Path]) -> list[str]:
    return [*toy_models(tiny_folders), "features=relu", "features.random_relu=11", "features.random_products=6"]


def test_a_map_has_the_weights_of_its_calibration(overrides: list[str], tmp_path: Path) -> None:
    """Not those that another torch would draw when it is fitted."""
    moments = find_calibration(settings_of("train", tmp_path, *overrides))
    weights = {name: tensor + 1 for name, tensor in load_file(moments / RANDOM_FILE).items()}
    save_file(weights, moments / RANDOM_FILE)
    vouch_for_nothing(moments)
    fitted = CacheMap.load(run("train", tmp_path, *overrides)).random
    assert fitted is not None
    assert fitted.layers == (0, 1)
    assert fitted.widths == {"random_relu": 11, "random_products": 6}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in fitted.tensors().items())
    # A leaner map of the same moments keeps what it reads only.
    lean = settings_of("train", tmp_path, *overrides, "features.random_products=0")
    lean = replace(lean, calibration=settings_of("train", tmp_path, *overrides).calibration)
    found = CacheMap.load(train(lean)).random
    assert found is not None
    assert found.widths == {"random_relu": 11}


def vouch_for_nothing(directory: Path) -> None:
    """A run as earlier versions made it, whose record knows no digests."""
    record = read_json(directory / RECORD)
    del record["files"]
    write_json(directory / RECORD, record)


def test_a_calibration_without_its_weights_has_to_be_made_again(overrides: list[str], tmp_path: Path) -> None:
    moments = find_calibration(settings_of("train", tmp_path, *overrides))
    (moments / RANDOM_FILE).unlink()
    vouch_for_nothing(moments)
    with pytest.raises(KvxferError, match=r"random\.safetensors is missing.*calibrate again") as refusal:
        run("train", tmp_path, *overrides)
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "train").glob("[!.]*"))
    made = settings_of("calibrate", tmp_path, *calibration_of(overrides), "force=true")
    calibrate(replace(made, calibration=settings_of("train", tmp_path, *overrides).calibration))
    assert CacheMap.load(run("train", tmp_path, *overrides)).random is not None


def calibration_of(overrides: list[str]) -> list[str]:
    return [o for o in overrides if not o.startswith(("features", "solver"))]


def test_shares_are_merged_with_their_weights(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_stage, "load_pair", lambda spec: tiny_pair)

    def share(index: int) -> Path:
        corpus = {"num_shards": 2, "shard_index": index}
        return calibrate(make_settings(tiny_pair.spec, tmp_path, corpus, {"features": BOTH}))

    first = share(0)
    kept = (first / RANDOM_FILE).read_bytes()
    # The second share has drawn others.
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: 2 * randn(*shape, **options))
    with pytest.raises(KvxferError, match=r"not the same as .*one version of torch"):
        share(1)
    monkeypatch.setattr(torch, "randn", randn)
    corpus = {"num_shards": 2, "shard_index": 1}
    merged = calibrate(make_settings(tiny_pair.spec, tmp_path, corpus, {"features": BOTH}, force=True))
    assert merged != first
    assert (merged / RANDOM_FILE).read_bytes() == kept
    layout = Moments.load(merged / "fit.safetensors").layout
    assert load_random(layout, merged / RANDOM_FILE) is not None


def test_a_killed_pass_goes_on_with_the_weights_it_had(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_stage, "load_pair", lambda spec: tiny_pair)
    settings = make_settings(tiny_pair.spec, tmp_path / "killed", calibration={"features": BOTH})
    prefill, calls = LoadedModel.prefill, []

    def killed(self: LoadedModel, ids: torch.Tensor, past: KV | None = None, hidden: bool = False) -> KV:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return prefill(self, ids, past, hidden)

    monkeypatch.setattr(LoadedModel, "prefill", killed)
    with pytest.raises(KeyboardInterrupt):
        calibrate(settings)
    monkeypatch.setattr(LoadedModel, "prefill", prefill)
    with monkeypatch.context() as other:
        other.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape))
        path = calibrate(settings)
    whole = calibrate(replace(settings, outputs=tmp_path / "whole"))
    assert (path / RANDOM_FILE).read_bytes() == (whole / RANDOM_FILE).read_bytes()
    for name in SPLIT_FILES:
        assert_same(Moments.load(path / name), Moments.load(whole / name), 1e-12)


@pytest.mark.parametrize("name", ["hidden", "products random_products=8"])
def test_a_design_goes_through_all_commands(name: str, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    option, *changed = name.split()
    overrides = [*toy_models(tiny_folders), f"features={option}", *(f"features.{each}" for each in changed), *TOY_EVAL]
    results = results_of(run("evaluate", tmp_path, *overrides))
    assert results["map"]["features"] == name
    # Two source layers' keys and values, 64 columns each, and the source's hidden state of 64.
    assert results["map"]["bytes_read_per_token"] == 2 * 64 * (4 + (name == "hidden"))
    assert results["map"]["bytes_written_per_token"] == 2 * 64 * 2 * 3
    log = (tmp_path / "train" / results["map"]["run_id"] / "metrics.jsonl").read_text()
    assert '"fit/bytes_read_per_token"' in log
    assert '"fit/bytes_written_per_token"' in log
