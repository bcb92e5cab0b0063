"""The whole cost of a handoff: every part between the source's last token and the target's first, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.latency.clocks import Stopwatch, forget_file, peak_bandwidth, peak_flops
from kvxfer.evals.latency.costs import break_even, compare, map_work, prefill_work, savings, spread
from kvxfer.evals.latency.vllm import figures_for
from kvxfer.evals.specs import LatencySpec
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import MANIFEST, TENSORS, CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.machine import machine
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text.spec import CorpusSpec

_OF_SOURCE = ("export", "source")
_FIXED = ("map", "exact", "held_back", "first_decode", "source", "target")
"""What has a part that does not grow with depth: angles are computed once, and a model has its embedding and head."""


@dataclass(frozen=True)
class Clocked:
    """Seconds of each round: of every step, of ``source`` (its prefill) and ``target`` (its own, to its first token).

    ``handoff`` are the rounds' sums of steps; ``whole`` the handoff under one clock, without waiting for its steps
    (None where the times are scaled from a slice, which leaves only steps to scale).
    """

    parts: dict[str, list[float]]
    whole: list[float] | None

    @property
    def handoff(self) -> list[float]:
        """Seconds of all steps of each round together."""
        return [float(sum(steps)) for steps in zip(*(self.parts[step] for step in STEPS), strict=True)]


@torch.inference_mode()
def clock(
    transfer: Transfer,
    length: int,
    batch: int,
    repeats: int,
    warmup: int,
    seed: int,
    advance: Callable[[int], None],
) -> Clocked:
    """Time ``repeats`` rounds after ``warmup`` others, on random tokens; a slice's times are scaled to all layers."""
    pair, source, target = transfer.pair, transfer.pair.source, transfer.pair.target
    draw = torch.Generator().manual_seed(seed)
    vocabulary = min(source.geometry.vocabulary, target.geometry.vocabulary)
    rounds: list[dict[str, float]] = []
    whole: list[float] = []
    for _ in range(warmup + repeats):
        # New tokens each time: nothing may be remembered.
        prompt = torch.randint(vocabulary, (batch, length), generator=draw).to(target.device)
        watch = Stopwatch(target.device)
        watch.start()
        running = transfer.read(transfer.split(prompt)[0])
        watch.lap("source")
        transfer.first_token(running, prompt, watch.lap)
        target.next_token(target.inject(None), prompt)
        watch.lap("target")
        whole.append(watch.of(lambda: transfer.first_token(running, prompt)))  # noqa: B023
        if _is_slice(pair):
            watch.seconds |= _without_layers(transfer, prompt)
        rounds.append(watch.seconds)
        del running
        advance(1)
    parts = {name: [each[name] for each in rounds[warmup:]] for name in rounds[0]}
    return Clocked(_of_all_layers(parts, pair), None) if _is_slice(pair) else Clocked(parts, whole[warmup:])


def _layers(pair: Pair) -> dict[str, list[int]]:
    """Layers of each side that are run, and layers of the whole model."""
    sides = {"source": pair.source, "target": pair.target}
    return {side: [model.geometry.layers, model.whole.layers] for side, model in sides.items()}


def _more_layers(pair: Pair) -> dict[str, float]:
    """How many times more layers the whole models have than those that are run."""
    return {side: whole / run for side, (run, whole) in _layers(pair).items()}


def _is_slice(pair: Pair) -> bool:
    return any(run != whole for run, whole in _layers(pair).values())


def _without_layers(transfer: Transfer, prompt: Int[Tensor, "batch prompt"]) -> dict[str, float]:
    """What steps cost whatever the depth, under ``base_`` and the step's name."""
    source, target = transfer.pair.source, transfer.pair.target
    head, tail = transfer.split(prompt)
    watch = Stopwatch(target.device)
    past = target.prefill(head)
    found = {"base_map": watch.of(lambda: [model.cos_sin(head.shape[1]) for model in (source, target)])}
    with source.without_layers(), target.without_layers():
        found["base_source"] = watch.of(lambda: source.begin(head, hidden=transfer.mapper.needs_hidden))
        found["base_target"] = watch.of(lambda: target.next_token(target.inject(None), prompt))
        first = min(transfer.plan.exact_first, head.shape[1])
        found["base_exact"] = watch.of(lambda: target.begin(head[:, :first])) if first else 0.0
        running = target.inject(past)
        found["base_held_back"] = 0.0
        if tail.shape[1] > 1:
            found["base_held_back"] = watch.of(lambda: target.extend(running, tail[:, :-1]))
        found["base_first_decode"] = watch.of(lambda: target.next_token(running, tail[:, -1:]))
    return found


def _of_all_layers(parts: dict[str, list[float]], pair: Pair) -> dict[str, list[float]]:
    """Times of all layers: what grows with depth times as many as there are more layers, the rest once.

    Mapping grows with the target's layers here; its stripping, about a tenth of it, does with the source's.
    """
    found = {}
    for name in (*STEPS, "source", "target"):
        factor = _more_layers(pair)["source" if name in _OF_SOURCE else "target"]
        fixed = float(np.median(parts[f"base_{name}"])) if name in _FIXED else 0.0
        found[name] = [min(fixed, each) + (each - min(fixed, each)) * factor for each in parts[name]]
    return found


LOADS = 3


@dataclass(frozen=True)
class Latency(LatencySpec, Evaluation):
    """``eval=latency``: what it measures."""

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        for length in self.lengths:
            pair.check_length(length, "eval.lengths")
            plan.mapped_span(length)

    def measure(self, subject: Subject) -> dict[str, Any]:
        _require_scalable(subject)
        pair, target = subject.pair, subject.pair.target
        lengths, batches = sorted(set(self.lengths)), sorted(set(self.batch_sizes))
        self.check(pair, subject.corpus, subject.plan)
        about = _machine(subject)
        outside = {}
        if self.vllm is not None:
            random = subject.cache_map.manifest.get("random", False)
            known = {"revision": None if random else target.revision, "dtype": about["dtype"], "device": about["name"]}
            outside = figures_for(self.vllm, known, lengths, target.whole, about["peak_flops"])
        more = _more_layers(pair)
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
            "scaled": _layers(pair) if _is_slice(pair) else None,
            "settings": {**asdict(self), "plan": vars(subject.plan)},
            "load": {**spread(load), "bytes": subject.cache_map.bytes * more["target"]},
            "fit_seconds": self.fit_seconds or subject.fit_seconds,
            "points": points,
            "break_even": [_break_even([point for point in points if point["batch"] == batch]) for batch in batches],
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
        more, cache_map = _more_layers(subject.pair), subject.cache_map
        medians = {name: spread(values)["median"] for name, values in clocked.parts.items()}
        rows, width = subject.plan.mapped_span(length)[1] * batch, subject.pair.source.dtype.itemsize
        travels = cache_map.bytes_from_source_per_token * more["source"] * rows * width / 2
        over = 0.0 if self.bandwidth is None else travels / (1e9 * self.bandwidth)
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
                savings(medians, batch, over, load, fit, bytes_of_map, share, self) for share in self.acceptance
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


def _require_scalable(subject: Subject) -> None:
    """Refuse a slice of a map that reads what does not grow with depth: its times cannot be scaled."""
    extras = subject.cache_map.extras
    if _is_slice(subject.pair) and extras:
        kinds = ", ".join(sorted({block.kind for block in extras}))
        raise KvxferError(
            f"pair.layers: the map reads {kinds}, whose cost does not grow with depth, so the times of a slice "
            "cannot be scaled: choose other features (same, both, previous), or time whole models (pair.layers=null)"
        )


def _loads(subject: Subject) -> list[float]:
    """Seconds to read the map from disk, verify its hash and put it on the device."""
    watch = Stopwatch(subject.pair.target.device)

    def load() -> None:
        Mapper(CacheMap.load(subject.directory), subject.pair.target.device, subject.mapper.dtype, subject.pair)

    found = []
    for _ in range(LOADS):
        for name in (MANIFEST, TENSORS):
            forget_file(subject.directory / name)
        found.append(watch.of(load))
    return found


def _roofs(subject: Subject, length: int, batch: int, medians: Data, about: Data) -> dict[str, Any]:
    """The least time that mapping and both prefills can take, and what fraction of the measured time that is."""
    pair, more = subject.pair, _more_layers(subject.pair)
    head, width = subject.plan.mapped_span(length)[1], pair.target.dtype.itemsize
    work = {
        "map": map_work(
            subject.cache_map, head, batch, width, subject.mapper.dtype.itemsize, more["source"], more["target"]
        ),
        "target": prefill_work(pair.target.whole, length, batch, width, first_token=True),
        "source": prefill_work(pair.source.whole, head, batch, width, first_token=False),
    }
    found = {}
    for name, each in work.items():
        roof = each.roof(about["peak_flops"], about["bandwidth"])
        found[name] = {**roof, "measured": medians[name], "fraction": roof["roof"] / medians[name]}
    own = work["map"].roof(about["map_peak_flops"], about["bandwidth"])["roof"]
    found["map"]["fraction_of_own"] = own / medians["map"]
    return found


def _break_even(points: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = [point["length"] for point in points]
    ways = ("warm", "loaded", "cold")
    found = {way: break_even(lengths, [point[way]["saving"] for point in points]) for way in ways}
    return {"batch": points[0]["batch"], "up_to": lengths[-1], **found}
