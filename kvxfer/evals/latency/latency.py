"""The whole cost of a handoff: every part between the source's last token and the target's first, and what it saves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.latency.clocks import Stopwatch, forget_file, machine, peak_bandwidth, peak_flops, run_seconds
from kvxfer.evals.latency.costs import Rates, break_even, compare, map_work, prefill_work, savings, spread
from kvxfer.evals.latency.rounds import Clocked, clock
from kvxfer.evals.latency.vllm import figures_for
from kvxfer.files import file_sha256
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import MANIFEST, TENSORS, CacheMap
from kvxfer.progress import progress
from kvxfer.report.latency import latency_sections
from kvxfer.report.latency_figure import latency_figure
from kvxfer.report.latency_verdict import latency_verdict
from kvxfer.report.verdict import Verdict

log = logging.getLogger("kvxfer")

LOADS = 3
FEWEST = 6  # rounds: fewer give no 95 % interval of a median


@dataclass(frozen=True)
class Latency(Evaluation):
    """``eval=latency``: prompts of ``lengths`` tokens in batches of each of ``batch_sizes``, ``repeats`` rounds each.

    A round is the source's prefill, the handoff with a clock after every step, the handoff as a whole, and the target's
    own prefill to its first token: what is compared is measured side by side. ``acceptance``, ``handoffs``,
    ``handoffs_per_fit``, ``shadow_rate`` and ``bandwidth`` (GB/s, None: one device) are the formula's; ``fit_seconds``
    replaces what the map's runs recorded, and ``vllm`` names a file of ``benchmarks/vllm_prefill.py``.
    """

    kind = "latency"
    heading = "The whole cost of a handoff"
    timed: ClassVar[bool] = True

    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 10
    warmup: int = 2
    acceptance: tuple[float, ...] = (1.0, 0.9, 0.7)
    handoffs: int = 1000
    handoffs_per_fit: int = 1000000
    shadow_rate: float = 0.0
    bandwidth: float | None = None
    fit_seconds: float | None = None
    vllm: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("lengths", 2), ("batch_sizes", 1), ("acceptance", 0)):
            values = getattr(self, key)
            if not values or any(value < least for value in values):
                raise KvxferError(f"eval.{key}={list(values)} must hold one number or more, each {least} or more")
        if any(not 0 < share <= 1 for share in self.acceptance):
            raise KvxferError(f"eval.acceptance={list(self.acceptance)} must be shares above 0 and up to 1")
        for key, least in (("repeats", FEWEST), ("warmup", 0), ("handoffs", 1), ("handoffs_per_fit", 1)):
            if getattr(self, key) < least:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be {least} or more")
        if not 0 <= self.shadow_rate < 1:
            raise KvxferError(f"eval.shadow_rate={self.shadow_rate} must be a share from 0 to below 1")
        for key in ("bandwidth", "fit_seconds"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise KvxferError(f"eval.{key}={value} must be above 0 and finite, or null")

    def identity(self) -> dict[str, Any]:
        """As of any evaluation, with the content of the vLLM file in place of its name."""
        found = super().identity()
        if self.vllm is not None:
            found["vllm"] = file_sha256(Path(self.vllm)) if Path(self.vllm).is_file() else self.vllm
        return found

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Times of every length and batch, the map's loading, the machine's peaks, and what follows from them."""
        _require_scalable(subject)
        pair, target = subject.pair, subject.pair.target
        lengths, batches = sorted(set(self.lengths)), sorted(set(self.batch_sizes))
        for length in lengths:
            pair.check_length(length, "eval.lengths")
            subject.plan.mapped_span(length)
        about = _machine(subject)
        outside = {}
        if self.vllm is not None:
            random = subject.cache_map.manifest.get("random", False)
            known = {"revision": None if random else target.revision, "dtype": about["dtype"], "device": about["name"]}
            outside = figures_for(self.vllm, known, lengths, target.whole, about["peak_flops"])
        more = _more_layers(subject)
        load = [seconds * more["target"] for seconds in _loads(subject)]
        transfer = subject.transfer
        points = []
        with progress("latency", len(lengths) * len(batches) * (self.repeats + self.warmup), "rounds") as advance:
            for length in lengths:
                for batch in batches:
                    clocked = self._clock(transfer, length, batch, advance)
                    point = self._point(subject, length, batch, clocked, about, spread(load)["median"])
                    points.append({**point, "vllm": outside.get(length) if batch == 1 else None})
        return {
            "machine": about,
            "models": {"source": pair.source.name, "target": target.name},
            "random": bool(subject.cache_map.manifest.get("random", False)),
            "scaled": _scaled(subject),
            "settings": {**self.identity(), "plan": vars(subject.plan)},
            "load": {**spread(load), "bytes": subject.cache_map.bytes * more["target"]},
            "fit_seconds": self._fit_seconds(subject),
            "points": points,
            "break_even": [_break_evens(points, batch) for batch in batches],
        }

    def _clock(self, transfer: Transfer, length: int, batch: int, advance: Callable[[int], None]) -> Clocked:
        try:
            return clock(transfer, length, batch, self.repeats, self.warmup, self.seed, advance)
        except torch.OutOfMemoryError as error:
            raise KvxferError(
                f"eval.lengths, eval.batch_sizes: {batch} prompts of {length} tokens do not fit the device beside the "
                "models; ask for fewer, or with pair=geometry set pair.layers=2"
            ) from error

    def _point(
        self, subject: Subject, length: int, batch: int, clocked: Clocked, about: Data, load: float
    ) -> dict[str, Any]:
        """One length and batch."""
        more, cache_map = _more_layers(subject), subject.cache_map
        medians = {name: spread(values)["median"] for name, values in clocked.parts.items()}
        rows, width = subject.plan.mapped_span(length)[1] * batch, subject.pair.source.dtype.itemsize
        travels = cache_map.bytes_from_source_per_token * more["source"] * rows * width / 2
        rates = Rates(
            self.handoffs,
            self.handoffs_per_fit,
            self.shadow_rate,
            None if self.bandwidth is None else 1e9 * self.bandwidth,
        )
        over = 0.0 if rates.bandwidth is None else travels / rates.bandwidth
        handoff = [over + seconds for seconds in clocked.handoff]
        with_load = [load + seconds for seconds in handoff]
        cold = [a + b for a, b in zip(handoff, clocked.parts["source"], strict=True)]
        prefill, bytes_of_map = clocked.parts["target"], cache_map.bytes * more["target"]
        fit = self._fit_seconds(subject)
        return {
            "length": length,
            "batch": batch,
            "parts": {name: spread(clocked.parts[name]) for name in STEPS},
            "wire": over,
            "whole": None if clocked.whole is None else spread(clocked.whole),
            "handoff": spread(handoff),
            "source": spread(clocked.parts["source"]),
            "target": spread(prefill),
            "warm": compare(handoff, prefill),
            "loaded": compare(with_load, prefill),
            "cold": compare(cold, prefill),
            "source_bytes": travels,
            "target_bytes": cache_map.bytes_written_per_token * more["target"] * rows * width / 2,
            "roofs": _roofs(subject, length, batch, medians, about),
            "savings": [
                savings(medians, batch, travels, load, fit, bytes_of_map, share, rates) for share in self.acceptance
            ],
        }

    def _fit_seconds(self, subject: Subject) -> float | None:
        """How long calibration and fit took, by their runs' records; None where one has none."""
        if self.fit_seconds is not None:
            return self.fit_seconds
        calibration = subject.cache_map.manifest.get("calibration")
        if calibration is None:
            return None
        fit = run_seconds(subject.directory)
        calibrated = run_seconds(subject.outputs / "calibrate" / calibration)
        return None if fit is None or calibrated is None else fit + calibrated

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """Does the handoff save time at the lengths asked, warm and cold?"""
        return latency_verdict(data)

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """Times, break-even lengths, parts, the formula and roofs."""
        return latency_sections(data)

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """Times, ratios and the map's fraction of its roof, by length and batch; the map's loading."""
        found: dict[str, float] = {"load_seconds": data["load"]["median"]}
        for point in data["points"]:
            at = f"{point['length']}/{point['batch']}"
            for name in ("handoff", "source", "target"):
                found[f"{at}/{name}_seconds"] = point[name]["median"]
            for name in ("warm", "loaded", "cold"):
                found[f"{at}/{name}_ratio"] = point[name]["ratio"]
            found |= {f"{at}/{name}_seconds": part["median"] for name, part in point["parts"].items()}
            found |= {f"{at}/{name}_fraction_of_roof": roof["fraction"] for name, roof in point["roofs"].items()}
        return found

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """The parts stacked, against the target's own prefill."""
        latency_figure(data, folder / "latency_parts.png")


def _machine(subject: Subject) -> dict[str, Any]:
    """The device, how the models and the map run on it, and its peaks in this process."""
    target, mapper = subject.pair.target, subject.mapper
    peaks = {dtype: peak_flops(target.device, dtype) for dtype in {target.dtype, mapper.dtype}}
    return {
        **machine(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "map_dtype": str(mapper.dtype).removeprefix("torch."),
        "attention": subject.pair.spec.attention,
        "peak_flops": peaks[target.dtype],
        "map_peak_flops": peaks[mapper.dtype],
        "bandwidth": peak_bandwidth(target.device),
    }


def _more_layers(subject: Subject) -> dict[str, float]:
    """How many times more layers the whole models have than those that are run."""
    sides = {"source": subject.pair.source, "target": subject.pair.target}
    return {side: model.whole.layers / model.geometry.layers for side, model in sides.items()}


def _scaled(subject: Subject) -> dict[str, list[int]] | None:
    """Layers that were timed and layers of the whole models, where these differ."""
    sides = {"source": subject.pair.source, "target": subject.pair.target}
    layers = {side: [model.geometry.layers, model.whole.layers] for side, model in sides.items()}
    return layers if any(timed != whole for timed, whole in layers.values()) else None


def _require_scalable(subject: Subject) -> None:
    """Refuse a slice of a map that reads what does not grow with depth: its times cannot be scaled."""
    extras = subject.cache_map.extras
    if _scaled(subject) and extras:
        kinds = ", ".join(sorted({block.kind for block in extras}))
        raise KvxferError(
            f"pair.layers: the map reads {kinds}, whose cost does not grow with depth, so the times of a slice "
            "cannot be scaled: choose other features (same, both, previous), or time whole models (pair.layers=null)"
        )


def _loads(subject: Subject) -> list[float]:
    """Seconds to read the map from disk, verify its hash and put it on the device."""
    watch = Stopwatch(subject.pair.target.device)

    def load() -> None:
        Mapper(CacheMap.load(subject.directory), subject.pair.target.device, pair=subject.pair)

    found = []
    for _ in range(LOADS):
        for name in (MANIFEST, TENSORS):
            forget_file(subject.directory / name)
        found.append(watch.of(load))
    return found


def _roofs(subject: Subject, length: int, batch: int, medians: Data, about: Data) -> dict[str, Any]:
    """The least time that mapping and both prefills can take, and what fraction of the measured time that is."""
    pair, more = subject.pair, _more_layers(subject)
    head, width = subject.plan.mapped_span(length)[1], pair.target.dtype.itemsize
    work = {
        "map": map_work(subject.cache_map, head, batch, width, more["source"], more["target"]),
        "target": prefill_work(pair.target.whole, length, batch, width, first_token=True),
        "source": prefill_work(pair.source.whole, head, batch, width, first_token=False),
    }
    measured = {**medians, "map": sum(medians[step] for step in ("strip", "map", "restore"))}
    found = {}
    for name, each in work.items():
        roof = each.roof(about["peak_flops"], about["bandwidth"])
        found[name] = {**roof, "measured": measured[name], "fraction": roof["roof"] / measured[name]}
    own = work["map"].roof(about["map_peak_flops"], about["bandwidth"])["roof"]
    found["map"]["fraction_of_own"] = own / measured["map"]
    return found


def _break_evens(points: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    mine = [point for point in points if point["batch"] == batch]
    lengths = [point["length"] for point in mine]
    found: dict[str, Any] = {"batch": batch, "up_to": lengths[-1]}
    for way in ("warm", "loaded", "cold"):
        found[way] = break_even(lengths, [point[way]["saving"] for point in mine])
    return found
