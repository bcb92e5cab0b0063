"""How fast layers are ranked and a path of λ is scored, against the plain way: a factorisation for every single score.

    python benchmarks/selection.py

Random moments of a pair with as many source as target layers, keys from keys and values from values. Three jobs:

- selection: every target layer from every source layer alone, at every λ;
- path, shared: the best λ of every target layer's keys, all reading one set of four source layers;
- path, all differ: the same, each reading a set of its own.

The reference takes a float64 Cholesky factorisation, a solve and a validation R² for every target layer, source layer
(or set) and λ. ``per λ`` is what one factorisation for all target layers that share a set leaves of that. Both read the
same moments and must give the same scores. Exit code 1: scores differ, or a ratio is below its bar.

Then whole fits of ridge, ``same`` and ``previous`` with four source layers of which each target layer has its own, from
moments on disk: what share is reading (loading and gathering), selection of source layers, solves (factorisations and
what they are applied to) and scores; with ``--against`` another checkout's fit in turns.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from other_tree import modules_of
from torch import Tensor

from kvxfer.fitting.closed import Ridge, Splits, closed_form, design
from kvxfer.fitting.closed.design import Design
from kvxfer.fitting.closed.engine import Engine
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.fitting.dials import Isotropic
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Features, Output
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments

SAME = DESIGNS["same"]
HEADS, K, POOL = 4, 4, 8
ROUNDS = 3
BARS = {"selection": 10.0, "path, shared": 5.0}
TOLERANCE = 1e-8


@dataclass
class Job:
    """One job's seconds, the largest difference between its scores, and the peak of its tensors in bytes."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("reference", "per λ", "kvxfer"), 0.0))
    apart: float = 0.0
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times faster than the reference."""
        return self.seconds["reference"] / self.seconds["kvxfer"]

    def compare(self, ways: dict[str, Callable[[], Tensor]]) -> None:
        """Time every way; the first time also measure what each allocates."""
        if not self.peak:
            self.peak = {name: peak_bytes(way) for name, way in ways.items()}
        scores = {}
        for name, way in ways.items():
            started = time.perf_counter()
            scores[name] = way()
            self.seconds[name] += time.perf_counter() - started
        self.apart = max([self.apart, *(float((s - scores["reference"]).abs().max()) for s in scores.values())])


def peak_bytes(way: Callable[[], Tensor]) -> int:
    """The most bytes of tensors that a call holds at once beyond what was there, as torch's profiler records them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        way()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)


def random_splits(source_layers: int, layers: int, width: int, tokens: int, seed: int) -> Splits:
    """Moments of correlated features and of outputs that they explain in part; the validation rows' means differ."""
    layout = Layout.of(SAME, list(range(source_layers)), layers, width, HEADS)
    draw = torch.Generator().manual_seed(seed)
    columns = layout.starts[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    scale, common = torch.logspace(0, -2, columns)[torch.randperm(columns, generator=draw)], normal(32, columns) / 8
    weight = normal(columns, len(layout.outputs) * width)
    found = []
    for split in range(2):
        moments = Moments(layout)
        for _ in range(4):
            x = (normal(tokens // 4, columns) + normal(tokens // 4, 32) @ common + 0.1 * split) * scale
            y = x @ weight + 0.3 * normal(tokens // 4, weight.shape[1])
            moments.update(x, y.unflatten(1, (-1, width)))
        found.append(moments)
    return Splits(found[0], found[1], found[1])


def reference(splits: Splits, blocks: tuple[Block, ...], outputs: list[Output], lams: list[float]) -> Tensor:
    """Scores ``[lams, outputs]``, with a factorisation and a solve for each."""
    fit, other = splits.fit, splits.validation
    gram, seen = fit.design(blocks), other.design(blocks)
    unit = gram.diagonal().mean()
    step = other.mean_of(blocks) - fit.mean_of(blocks)
    scores = torch.empty(len(lams), len(outputs), dtype=torch.float64)
    for n, output in enumerate(outputs):
        cross, wanted = fit.targets(blocks, [output]), other.targets(blocks, [output])
        total, offset = other.variance_target([output]), other.mean_target([output]) - fit.mean_target([output])
        for row, lam in enumerate(lams):
            penalised = gram.clone()
            penalised.diagonal().add_(lam * unit)
            weight = torch.cholesky_solve(cross, torch.linalg.cholesky(penalised))
            explained = (weight * (2 * wanted - seen @ weight)).sum(0)
            residual = total - explained + other.count * (step @ weight - offset) ** 2
            scores[row, n] = (1 - residual.view(HEADS, -1).sum(1) / total.view(HEADS, -1).sum(1)).mean()
    return scores


def per_lam(engine: Engine, blocks: tuple[Block, ...], outputs: list[Output], lams: list[float]) -> Tensor:
    """The same with one factorisation for all outputs."""
    design = Design(engine.solver, engine.layout, blocks, outputs, engine.splits.moments)
    rows = []
    for lam in lams:
        weight, _ = design.ridge(lam, list(range(len(outputs))))
        rows.append(engine.judge(design.held["validation"], weight, design.bias(weight)))
    return torch.stack(rows)


def select(layers: int, width: int, lams: list[float]) -> Job:
    """Source layer by source layer, whose moments are independent: all need not be held at once."""
    job = Job()
    for layer in range(layers):
        splits = random_splits(1, layers, width, 4 * width, layer)
        engine = Engine(Ridge(k=1, features=SAME), splits)
        designs = [
            (SAME.blocks(kind, [0]), [output for output in splits.fit.layout.outputs if output[1] == kind])
            for kind in KINDS
        ]
        job.compare(
            {
                "reference": lambda s=splits, d=designs: torch.cat([reference(s, *each, lams) for each in d], 1),
                "per λ": lambda e=engine, d=designs: torch.cat([per_lam(e, *each, lams) for each in d], 1),
                "kvxfer": lambda e=engine: torch.cat(list(e.lam_scores((0,), tuple(lams)).values()), 1),
            }
        )
    return job


@dataclass(frozen=True)
class LamPath(Isotropic):
    """Ridge's penalty over the λ of this benchmark."""

    lams: tuple[float, ...] = ()

    @property
    def candidates(self) -> tuple[dict[str, float], ...]:
        return tuple({"lam": lam} for lam in self.lams)


def paths(layers: int, width: int, lams: list[float]) -> dict[str, Job]:
    """The best λ of every target layer, and the weights there."""
    splits = random_splits(POOL, layers, width, 2 * K * width, 0)
    engine = Engine(Ridge(k=K, features=SAME, penalty=LamPath(lams=tuple(lams))), splits)
    keys = [output for output in splits.fit.layout.outputs if output[1] == "keys"]

    def chosen(blocks: tuple[Block, ...], outputs: list[Output]) -> Tensor:
        _, _, curve = engine.choose_setting(
            Design(engine.solver, engine.layout, blocks, outputs, engine.splits.moments)
        )
        return torch.tensor([scores for _, scores in curve], dtype=torch.float64)

    jobs = {"path, shared": Job(), "path, all differ": Job()}
    for job, sets in (
        ("path, shared", [(tuple(range(K)), keys)]),
        ("path, all differ", list(zip(itertools.combinations(range(POOL), K), [[key] for key in keys], strict=False))),
    ):
        for members, outputs in sets:
            design = SAME.blocks("keys", members), outputs
            jobs[job].compare(
                {
                    "reference": lambda d=design: reference(splits, *d, lams),
                    "per λ": lambda d=design: per_lam(engine, *d, lams),
                    "kvxfer": lambda d=design: chosen(*d),
                }
            )
    return jobs


class Shares:
    """Seconds of a fit by part; what is called within a part counts to it."""

    def __init__(self) -> None:
        self.seconds, self._within = dict.fromkeys(("reading", "selection", "solves", "scores"), 0.0), False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is the part's unless it is called within one."""

        def run(*given: Any, **options: Any) -> Any:
            if self._within:
                return function(*given, **options)
            self._within, started = True, time.perf_counter()
            try:
                return function(*given, **options)
            finally:
                self._within = False
                self.seconds[part] += time.perf_counter() - started

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block every part of a fit is timed."""
        places = [
            *(("reading", Moments, name) for name in ("load", "design", "targets")),
            ("selection", closed_form, "single_layer_scores"),
            *(("solves", Gram, name) for name in ("ridge", "ridge_per_column")),
            ("solves", torch.linalg, "eigh"),
            *(("scores", HeldOut, name) for name in ("errors", "r2_of_errors", "metric_r2_of_errors", "r2")),
            ("scores", design, "path_residuals"),
        ]
        with ExitStack() as stack:
            for part, owner, name in places:
                own = getattr(owner, name)
                watched = self.timed(part, own)
                static = name == "load"
                stack.enter_context(patch.object(owner, name, staticmethod(watched) if static else watched))
            yield


def whole_fit(features: Features, layers: int, width: int, against: Path | None) -> str:
    """The table's row of one design."""
    draw, names = torch.Generator().manual_seed(0), ("fit", "validation", "held_out")
    layout = Layout.of(features, list(range(layers)), layers, width, HEADS)
    tokens, columns = 2 * K * width * len(features.blocks("keys", [0])), layout.starts[-1]
    mixing = torch.randn(columns, len(layout.outputs) * width, generator=draw) / columns**0.5
    rows = {}
    for name in names:
        x = torch.randn(tokens, columns, generator=draw)
        y = x @ mixing + torch.randn(tokens, mixing.shape[1], generator=draw)
        rows[name] = x, y.unflatten(1, (-1, width))

    def ready(kind: Any, folder: Path) -> Callable[[], Any]:
        """A fit from files, by this checkout's modules or another's."""
        dials, closed, blocks, made, form = kind
        for name, (x, y) in rows.items():
            there = form.Layout.of(blocks.DESIGNS[features.name], list(range(layers)), layers, width, HEADS)
            moments = made.Moments(there)
            moments.update(x, y)
            moments.save(folder / f"{name}.safetensors")
        penalty = dials.Isotropic("auto")
        solver = closed.Ridge(k=K, features=blocks.DESIGNS[features.name], penalty=penalty)
        return lambda: solver.fit(closed.Splits(*(made.Moments.load(folder / f"{name}.safetensors") for name in names)))

    modules = [f"kvxfer.{name}" for name in ("fitting.dials", "fitting.closed", "maps.blocks")]
    modules += [f"kvxfer.moments.{name}" for name in ("moments", "layout")]
    shares, spent, times = Shares(), 0.0, list[float]()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        ours = ready([importlib.import_module(name) for name in modules], Path(one))
        theirs = None if against is None else ready(modules_of(against, *modules), Path(other))
        for each in (ours, theirs):  # a round that does not count
            if each is not None:
                each()
        for _ in range(ROUNDS):
            started = time.perf_counter()
            with shares.watching():
                ours()
            own = time.perf_counter() - started
            spent += own
            if theirs is not None:
                started = time.perf_counter()
                theirs()
                times.append((time.perf_counter() - started) / own)
    others = [f"{statistics.median(times):.1f}"] if times else []
    parts = {**shares.seconds, "rest": spent - sum(shares.seconds.values())}
    cells = [f"{K * width * len(features.blocks('keys', [0]))}", f"{spent / ROUNDS:.1f} s"]
    cells += [f"{seconds / spent:.0%}" for seconds in parts.values()]
    return f"| {features.name} | {' | '.join([*cells, *others])} |"


def whole_fits(layers: int, width: int, against: Path | None) -> str:
    """Markdown: where the time of whole fits goes."""
    head = ["design", "features", "fit", "reading", "selection", "solves", "scores", "rest"]
    head += [] if against is None else ["before / kvxfer"]
    lines = [f"Whole fits, {layers} layers of {width}:", "", f"| {' | '.join(head)} |"]
    lines.append("| :-- |" + " --: |" * (len(head) - 1))
    return "\n".join([*lines, *(whole_fit(DESIGNS[name], layers, width, against) for name in ("same", "previous"))])


def table(jobs: dict[str, Job]) -> str:
    """Markdown: seconds, then peaks."""
    lines = [
        "| job | reference | per λ | kvxfer | ratio | bar | scores apart |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, job in jobs.items():
        seconds = " | ".join(f"{value:.2f} s" for value in job.seconds.values())
        bar = f"{BARS[name]:.0f}" if name in BARS else "–"
        lines.append(f"| {name} | {seconds} | {job.ratio:.1f} | {bar} | {job.apart:.0e} |")
    lines += ["", "Peak of tensors beyond the moments, as torch's profiler records it:", ""]
    lines += ["| job | reference | per λ | kvxfer |", "| :-- | --: | --: | --: |"]
    for name, job in jobs.items():
        lines.append(f"| {name} | " + " | ".join(f"{value / 2**20:.1f} MiB" for value in job.peak.values()) + " |")
    return "\n".join(lines)


def failures(jobs: dict[str, Job]) -> list[str]:
    """What is wrong, one line each."""
    found = [f"{name}: scores differ by {job.apart:.0e}" for name, job in jobs.items() if not job.apart < TOLERANCE]
    slow = {name: job.ratio for name, job in jobs.items() if job.ratio < BARS.get(name, 0.0)}
    return found + [f"{name}: {ratio:.1f} times as fast, below {BARS[name]:.0f}" for name, ratio in slow.items()]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="source layers, and target layers (at most 70)")
    parser.add_argument("--width", type=int, default=256, help=f"columns of a layer's keys, {HEADS} heads")
    parser.add_argument("--lams", type=int, default=12, help="how many λ, log-spaced from 1e-9 to 100")
    parser.add_argument("--fit-layers", type=int, default=6, help="source layers, and target layers, of whole fits")
    parser.add_argument("--fit-width", type=int, default=192, help="columns of a layer's keys in whole fits")
    parser.add_argument("--against", type=Path, help="another checkout of this project, whose whole fits run in turns")
    args = parser.parse_args(arguments)
    if args.fit_layers < K:
        parser.error(f"--fit-layers must be {K} or more, the source layers that a target layer reads")
    lams = torch.logspace(-9, 2, args.lams, dtype=torch.float64).tolist()
    jobs = {"selection": select(args.layers, args.width, lams), **paths(args.layers, args.width, lams)}
    print(f"{args.layers} layers of {args.width}, {args.lams} λ, {torch.get_num_threads()} threads\n\n{table(jobs)}\n")
    print(f"{whole_fits(args.fit_layers, args.fit_width, args.against)}\n")
    print("ratios: " + ", ".join(f"{name} {job.ratio:.1f}" for name, job in jobs.items()))
    wrong = failures(jobs)
    print("\n".join(wrong) if wrong else "all bars are met")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
