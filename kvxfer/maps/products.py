"""Matrix products at the rate that the device has: in which dtype, and by which of torch's ways.

Both are measured once a process: a processor without instructions for bfloat16 computes it many times slower than
float32, and one library's float32 product may be half as fast as another's; which, no name of a processor says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError

_ROWS, _COLUMNS = 512, 1024
_TRIES = 3
_CLEARLY = 1.5
"""How many times as fast another dtype or way must be to be taken: noise must not choose, or processes would differ."""

Way = Callable[
    [Float[Tensor, "rows inputs"], Float[Tensor, "inputs outputs"], Float[Tensor, " outputs"] | None, Tensor | None],
    Float[Tensor, "rows outputs"],
]
"""``x @ weight + bias`` (without one where it is None), perhaps in the memory of the last argument."""


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight.T, bias, "none", [], "")


@dataclass(frozen=True)
class Product:
    """The fastest way to multiply in a dtype on a device, and the seconds that a product of fixed size took."""

    name: str
    run: Way
    seconds: float


def ways(device: torch.device, dtype: torch.dtype) -> dict[str, Way]:
    """The ways there are, by name; the first is torch's own choice."""
    found: dict[str, Way] = {"torch": _plain}
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if device.type == "cpu" and dtype == torch.float32 and there:
        found["oneDNN"] = _onednn
    return found


@functools.cache
def fastest(device: torch.device, dtype: torch.dtype) -> Product:
    """The fastest of torch's ways for products in this dtype."""
    found = {name: Product(name, way, _seconds(way, device, dtype)) for name, way in ways(device, dtype).items()}
    best = min(found.values(), key=lambda product: product.seconds)
    return best if _CLEARLY * best.seconds < found["torch"].seconds else found["torch"]


@functools.cache
def fastest_dtype(device: torch.device, caches: torch.dtype) -> torch.dtype:
    """bfloat16 for caches in it, where the device computes it clearly faster than float32; else float32.

    A map was fitted on caches with the rounding of their dtype, so that much of it in products does little. Coarser
    products than that do harm: on the toy pair, whose caches are float32, bfloat16 costs 12 points of accuracy. The
    weights of a map need not fit into the range of float16.
    """
    if caches != torch.bfloat16:
        return torch.float32
    low, full = (fastest(device, dtype).seconds for dtype in (caches, torch.float32))
    return caches if _CLEARLY * low < full else torch.float32


def resolve_dtype(name: str, device: torch.device, caches: torch.dtype) -> torch.dtype:
    """The dtype that ``map_dtype`` (one of ``kvxfer.maps.plan.MAP_DTYPES``) asks for.

    Args:
        caches: that of the source's cache, as it was when the map was fitted.

    Raises:
        KvxferError: the device does not have it.
    """
    if name == "auto":
        return fastest_dtype(device, caches)
    if device.type == "mps" and name == "float64":
        raise KvxferError("map_dtype=float64: this device has none; use float32")
    found: torch.dtype = getattr(torch, name)
    return found


@torch.inference_mode()
def _seconds(way: Way, device: torch.device, dtype: torch.dtype) -> float:
    """Of the best of a few products, after one that does not count."""
    x, weight = (torch.full((n, _COLUMNS), 0.5, device=device).to(dtype) for n in (_ROWS, _COLUMNS))
    bias, least = weight[0].clone(), float("inf")
    for _ in range(1 + _TRIES):
        started = time.perf_counter()
        float(way(x, weight.T, bias, None)[0, 0])  # what is read has been computed
        least = min(least, time.perf_counter() - started)
    return least
