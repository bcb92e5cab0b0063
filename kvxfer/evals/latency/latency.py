"""The whole cost of a handoff: every part between the source's last token and the target's first, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.latency.clocks import Stopwatch, forget_file, machine, peak_bandwidth, peak_flops
from kvxfer.evals.latency.costs import Rates, break_even, compare, map_work, prefill_work, savings, spread
from kvxfer.evals.latency.rounds import Clocked, clock
from kvxfer.evals.latency.vllm import figures_for
from kvxfer.evals.specs import LatencySpec
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import MANIFEST, TENSORS, CacheMap
from kvxfer.progress import progress

LOADS = 3


@dataclass(frozen=True)
class Latency(LatencySpec, Evaluation):
    """``eval=latency``: what it measures."""

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
            "settings": {**asdict(self), "plan": vars(subject.plan)},
            "load": {**spread(load), "bytes": subject.cache_map.bytes * more["target"]},
            "fit_seconds": self.fit_seconds or subject.fit_seconds,
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
        fit = self.fit_seconds or subject.fit_seconds
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
