"""In which dtype, and by which of torch's ways, products run: measured, and the plain one unless it matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.maps import products
from kvxfer.maps.plan import MAP_DTYPES
from kvxfer.maps.products import fastest, fastest_dtype, resolve_dtype, ways

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, torch.dtype], float]]:
    """What each way is said to take, and nothing remembered of what was measured."""
    said: dict[tuple[str, torch.dtype], float] = {}
    names = {way: name for dtype in (torch.float32, torch.bfloat16) for name, way in ways(CPU, dtype).items()}
    monkeypatch.setattr(products, "_seconds", lambda way, device, dtype: said.get((names[way], dtype), 1.0))
    for each in (fastest, fastest_dtype):
        each.cache_clear()
    yield said
    for each in (fastest, fastest_dtype):
        each.cache_clear()


def test_bfloat16_is_taken_where_it_is_clearly_faster(seconds: dict[tuple[str, torch.dtype], float]) -> None:
    seconds["torch", torch.bfloat16] = 0.9
    assert fastest_dtype(CPU, torch.bfloat16) == torch.float32
    fastest.cache_clear()
    fastest_dtype.cache_clear()
    seconds["torch", torch.bfloat16] = 0.25
    assert fastest_dtype(CPU, torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("float32", CPU, torch.bfloat16) == torch.float32
    for caches in (torch.float32, torch.float16):
        assert resolve_dtype("auto", CPU, caches) == torch.float32, "coarser than the caches, or of too small a range"


def test_another_library_is_taken_where_it_is_clearly_faster(seconds: dict[tuple[str, torch.dtype], float]) -> None:
    if "oneDNN" not in ways(CPU, torch.float32):
        pytest.skip("this torch has no oneDNN")
    seconds["oneDNN", torch.float32] = 0.9
    assert fastest(CPU, torch.float32).name == "torch"
    fastest.cache_clear()
    seconds["oneDNN", torch.float32] = 0.5
    assert fastest(CPU, torch.float32).name == "oneDNN"


def test_it_is_measured_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fastest(CPU, torch.float32)
    monkeypatch.setattr(products, "_seconds", lambda *_: pytest.fail("measured again"))
    assert fastest(CPU, torch.float32) is found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_multiplies_and_adds(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((9, 40), (12, 40), (12,)))
    wide = torch.zeros(9, 100, dtype=dtype)
    wide[:, 30:70] = x
    exact = x.double() @ weight.double().T + bias.double()
    for way in ways(CPU, dtype).values():
        for given in (x, wide[:, 30:70]):
            found = way(given, weight.T, bias, torch.empty(9, 12, dtype=dtype))
            assert torch.allclose(found.double(), exact, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_what_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(KvxferError, match="map_dtype=float64"):
        resolve_dtype("float64", torch.device("mps"), torch.bfloat16)
    assert all(resolve_dtype(name, CPU, torch.float32).is_floating_point for name in MAP_DTYPES)
