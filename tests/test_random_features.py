"""Random features: drawn once, kept with the calibration, and the same in all shares and every map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvxfer.calibration import CalibrationSpec, layout_for
from kvxfer.errors import KvxferError
from kvxfer.features import DESIGNS, KINDS, RANDOM, Block, Features
from kvxfer.layout import Layout
from kvxfer.pairs import Pair
from kvxfer.random_features import (
    RANDOM_FILE,
    RandomFeatures,
    RandomProducts,
    RandomRelu,
    keep_random,
    load_random,
    merge_random,
    random_columns,
)

BOTH = Features("r", random_relu=4, random_products=3)


def layout_of(features: Features, layers: int = 2, width: int = 6) -> Layout:
    return Layout.of(features, list(range(layers)), 2, width, 2, {kind: getattr(features, kind) for kind in RANDOM})


def test_a_draw_is_a_function_of_layers_and_widths(tiny_pair: Pair) -> None:
    layout = layout_for(tiny_pair, CalibrationSpec(features=DESIGNS["products"], layers=(1,)))
    one, two = RandomFeatures.draw(layout), RandomFeatures.draw(layout)
    assert one is not None
    assert two is not None
    assert one.layers == (1,)
    assert one.widths == {"random_products": 1500}
    for name, tensor in one.tensors().items():
        assert tensor.shape == (2 * layout.width, 1500)
        assert torch.equal(tensor, two.tensors()[name])
    assert RandomFeatures.draw(layout_for(tiny_pair, CalibrationSpec())) is None


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
    random = RandomFeatures.draw(layout_of(BOTH))
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
