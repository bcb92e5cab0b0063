"""How long a calibration pass takes, as a multiple of what can't be avoided: one bare forward of both models.

    python benchmarks/calibrate.py pair=smollm2_mild calibration.features=same
    python benchmarks/calibrate.py pair=smollm2_mild

The pass is that of calibrate.py over rows of the fit split, with all that it keeps of them. After each of its batches
both models read the same rows with nothing else to do, so that forwards and pass meet the same machine. The first batch
does not count; numbers are medians over the others, multiples those of single batches. Parts are
timed where the pass calls them; ``rest`` is what none of them covers. Writing a split's file takes as long however many
rows it has, so it stands beside the multiple. The last line is the multiple.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import compose, to_settings
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.machine import machine
from kvxfer.models.pair import Pair, load_pair
from kvxfer.moments import calibration
from kvxfer.moments.calibration import Extractor, accumulate, products_dtype
from kvxfer.moments.checkpoints import PassState
from kvxfer.moments.moments import Moments
from kvxfer.moments.query_metric import QueryMoments
from kvxfer.moments.schedule import PassPlan, size
from kvxfer.moments.sinks import SinkCounter
from kvxfer.moments.spec import CALIBRATION_SPLITS, CalibrationSpec
from kvxfer.text.corpus import Rows, load_rows

PARTS: list[tuple[str, Any, str]] = [
    ("forwards", LoadedModel, "prefill"),
    ("forwards", LoadedModel, "queries"),
    ("finite", calibration, "finite_rows"),
    ("stripping and columns", Extractor, "__call__"),
    ("products", Moments, "update"),
    ("weights", PassState, "update_weighted"),
    ("queries", QueryMoments, "update"),
    ("sinks", SinkCounter, "update"),
]


class Clock:
    """Seconds by part, of every batch that counts."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, 0.0
        self.seconds = defaultdict[str, float](float)
        self.batches: list[dict[str, float]] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def multiple(self, part: str) -> float:
        """A part's share of two bare forwards, the median of batches: both of one met the same machine."""
        return statistics.median(batch[part] / batch["two bare forwards"] for batch in self.batches)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is the part's."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            found = function(*args, **kwargs)
            self.seconds[part] += self.now() - started
            return found

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block every part of a pass is timed."""
        patches = [patch.object(place, name, self.timed(part, getattr(place, name))) for part, place, name in PARTS]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


class OneSplit(PassState):
    """A pass that ends after the fit split."""

    wrote = 0.0

    def finish_split(self, splits: Sequence[str]) -> None:
        if self.split == "fit":
            started = time.perf_counter()
            super().finish_split(splits)
            self.wrote = time.perf_counter() - started


def measure(pair: Pair, rows: Rows, spec: CalibrationSpec, skip_first: int, work: Path) -> tuple[Clock, float, int]:
    """Times of a pass and of bare forwards (``bare``), in turns; seconds that writing took, and bytes of the file."""
    clock = Clock(pair.source.device)
    length = rows.tokens.shape[1]
    plan = PassPlan(pair, spec, dict.fromkeys(CALIBRATION_SPLITS, len(rows)), length, skip_first)
    state = OneSplit(work, plan.layout, plan.home, pair.target.geometry, spec.weights != "none", products_dtype(pair))
    bare = [LoadedModel.prefill.__get__(model) for model in (pair.source, pair.target)]

    def forwards(tokens: int) -> None:
        spent = clock.now() - clock.started
        ids = rows.tokens[state.next_row - tokens // length : state.next_row]
        started = clock.now()
        for prefill in bare:
            prefill(ids)
        clock.started = clock.now()
        rest = spent - sum(clock.seconds.values())
        batch = {"two bare forwards": clock.started - started, **clock.seconds, "rest": rest, "pass": spent}
        clock.seconds.clear()
        if state.next_row > spec.batch_size:
            clock.batches.append(batch)

    nothing = replace(rows, tokens=rows.tokens[:0], documents=[])
    splits = {split: rows if split == "fit" else nothing for split in CALIBRATION_SPLITS}
    clock.started = clock.now()
    with clock.watching():
        accumulate(pair, splits, spec, skip_first, state, forwards)
    return clock, state.wrote, (work / "fit.safetensors").stat().st_size


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of calibrate.py: pair=..., calibration.features=...")
    parser.add_argument("--rows", type=int, default=60, help="rows of the fit split, one batch more than counts")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    args = parser.parse_intermixed_args(arguments)
    try:
        settings = to_settings("calibrate", compose("calibrate", args.overrides))
        pair, spec = load_pair(settings.pair), settings.calibration
        corpus = replace(settings.corpus, length=args.length)
        rows = load_rows(corpus, pair.tokenizer, "fit", args.rows)
        if len(rows) <= spec.batch_size:
            parser.error(f"--rows must be more than calibration.batch_size={spec.batch_size}")
        with tempfile.TemporaryDirectory() as work:
            clock, wrote, stored = measure(pair, rows, spec, corpus.skip_first, Path(work))
    except KvxferError as error:
        parser.error(str(error))
    about = ", ".join(map(str, machine(pair.source.device).values()))
    print(
        f"{settings.pair.label}, calibration.features={spec.features.name}, "
        f"{len(rows)} rows of {args.length}: {about}\n"
    )
    print("| part | seconds a batch | of two bare forwards |\n| :-- | --: | --: |")
    for name in clock.batches[0]:
        seconds = statistics.median(batch[name] for batch in clock.batches)
        print(f"| {name} | {seconds:.2f} | {clock.multiple(name):.2f} |")
    print(f"\na split's moments on disk: {size(stored)}, written in {wrote:.1f} s")
    print(f"multiple of two forwards: {clock.multiple('pass'):.2f}")


if __name__ == "__main__":
    main()
