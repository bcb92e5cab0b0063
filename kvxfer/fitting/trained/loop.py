"""A training from start to end: pair, base map and rows in, the layers and trunks of a map out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L

from kvxfer.errors import KvxferError
from kvxfer.files import read_json, write_json
from kvxfer.fitting.trained.activations import ActivationStore
from kvxfer.fitting.trained.callbacks import Recorder, StepLog, all_callbacks, waited
from kvxfer.fitting.trained.data import Data, Schedule, batches
from kvxfer.fitting.trained.engine import FINDER_RATES, find_rate, make_trainer, move, quiet
from kvxfer.fitting.trained.module import Stores, TrainedModule
from kvxfer.fitting.trained.networks import Network, make_network, trained_outputs
from kvxfer.fitting.trained.objective import Objective
from kvxfer.fitting.trained.resuming import (
    BEST,
    CHECKPOINTS,
    RATE,
    Checkpoint,
    find_checkpoint,
    question,
    read_checkpoint,
)
from kvxfer.fitting.trained.scales import Scales
from kvxfer.fitting.trained.scoring import mapped_by, measure, report
from kvxfer.fitting.trained.specs import Trained, TrainerSpec
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text.corpus import Rows

log = logging.getLogger("kvxfer")

RATE_FILE = "lr.json"
SCALE_ROWS = 64
"""Training rows that means and deviations of columns are measured on."""
_VALIDATION_SHARE = 0.25  # of trainer.cache_gib; the rest is for training rows


@dataclass(frozen=True)
class TrainingRows:
    """Rows to train on, to choose the best checkpoint on, and to report on; of one length, disjoint by document."""

    training: Rows
    validation: Rows
    held_out: Rows


@dataclass(frozen=True)
class TrainedMap:
    """The parts of a trained map, and the record of its training.

    Attributes:
        record: plain JSON: ``steps``, ``best_step``, ``seconds``, ``seconds_per_step``, ``stopped`` (``max_steps`` or
            ``patience``), ``lr``, ``trained_parameters``, ``base_val_kl``, ``history``, ``layers`` and ``outputs``
            (see :class:`kvxfer.fitting.trained.callbacks.Recorder`), and ``held_out``: ``base`` and ``trained`` as
            :func:`kvxfer.fitting.trained.scoring.report` gives them.
        question: names what was trained on what; checkpoints of it go on from one another.
    """

    layers: dict[Output, LinearLayer]
    trunks: tuple[Trunk, ...]
    record: dict[str, Any]
    question: str


def fit_network(
    pair: Pair,
    base: CacheMap,
    spec: Trained,
    trainer: TrainerSpec,
    rows: TrainingRows,
    exact: int,
    work: Path,
    out: StepLog,
) -> TrainedMap:
    """Train a map beside or in place of a base, or go on where a killed process was.

    With several devices, every process calls it and all return the same; the first alone writes and logs.

    Args:
        exact: how many first tokens of a row are always the target's own.
        work: where checkpoints are kept.

    Raises:
        KvxferError: settings or rows that do not fit, a checkpoint of another question, or a loss that is not finite.
    """
    with quiet():
        return _Fitting(pair, base, spec, trainer, rows, exact, work, out).run()


class _Fitting:
    """One training; the arguments are those of ``fit_network``."""

    def __init__(
        self,
        pair: Pair,
        base: CacheMap,
        spec: Trained,
        trainer: TrainerSpec,
        rows: TrainingRows,
        exact: int,
        work: Path,
        out: StepLog,
    ) -> None:
        self.pair, self.base, self.spec, self.trainer, self.work, self.out = pair, base, spec, trainer, work, out
        _check_rows(rows)
        length = rows.training.tokens.shape[1]
        self.schedule = Schedule(len(rows.training), length, exact, trainer.batch_size, trainer.seed)
        self.outputs = trained_outputs(base, spec)
        self.rows = rows
        self.question = question(spec, trainer, base.hash, [rows.training.digest, rows.validation.digest], exact)
        self.objective = Objective(pair, spec, exact)
        self.stores = Stores(
            self._store(rows.training, trainer.cache_gib * (1 - _VALIDATION_SHARE), spec.kl > 0),
            self._store(rows.validation, trainer.cache_gib * _VALIDATION_SHARE, True),
        )

    def run(self) -> TrainedMap:
        """Train, and measure what came of it."""
        recorder = Recorder(self.trainer)
        callbacks = all_callbacks(recorder, self.trainer, self.work / CHECKPOINTS)
        engine = make_trainer(self.trainer, self.pair.target.device, self.work, callbacks)
        first = engine.is_global_zero
        move(self.pair, engine.strategy.root_device)
        checkpoint = find_checkpoint(self.trainer.ckpt_path, self.work / CHECKPOINTS, self.question, first)
        if first:
            log.info("%s: the base map is measured on %d validation rows", self.spec.name, len(self.rows.validation))
        base_kl, recorder.look_seconds = self._look_at_base()
        recorder.rest_seconds = 2 * recorder.look_seconds * len(self.rows.held_out) / len(self.rows.validation)
        network = self._network()
        if first:
            self._announce(network, base_kl)
        lr = float(checkpoint.state[RATE]) if checkpoint else self._rate()
        module = self._module(network, lr)
        recorder.out = self.out if first else None
        self._fit(engine, module, recorder, checkpoint)
        best = engine.strategy.broadcast(str(self.work / CHECKPOINTS / BEST))
        found = read_checkpoint(Path(best), self.question, "the run's own best checkpoint", whole=False)
        module.load_state_dict(found.state["state_dict"])
        # What the optimiser holds is a multiple of the weights, and measuring needs room of its own.
        network.zero_grad()
        best_step = found.step
        del engine, module, found
        # The held-out rows share trainer.cache_gib with no others.
        self.stores.training.forget()
        self.stores.validation.forget()
        return self._finish(network, recorder, {"lr": lr, "base_val_kl": base_kl, "best_step": best_step})

    def _store(self, rows: Rows, cache_gib: float, logits: bool) -> ActivationStore:
        return ActivationStore(self.pair, self.base.blocks, rows.tokens, cache_gib, logits)

    def _look_at_base(self) -> tuple[float, float]:
        """The base's KL on the validation rows, and the seconds that such a look takes."""
        started = time.monotonic()
        found = measure(self.objective, self.stores.validation, mapped_by(self.pair, self.base), self.schedule)
        return found.kl, time.monotonic() - started

    def _network(self) -> Network:
        device = self.pair.target.device
        random = None if self.base.random is None else self.base.random.to(device)
        scales = Scales(self.base.blocks, self.outputs, self.schedule.exact, random)
        for some in batches(min(SCALE_ROWS, self.schedule.rows), self.trainer.batch_size):
            batch = self.stores.training.batch(some)
            scales.add(batch.source, batch.known, KV(batch.keys, batch.values))
        return make_network(self.base, self.spec, scales, self.trainer.seed, device)

    def _module(self, network: Network, lr: float) -> TrainedModule:
        return TrainedModule(network, self.objective, self.stores, self.trainer, lr, self.schedule.half, self.question)

    def _announce(self, network: Network, base_kl: float) -> None:
        log.info(
            "%s: %s numbers are trained (%.1f MB in float32); the base has %s and a validation KL of %.4f nats a token",
            self.spec.name,
            f"{network.trained:,}",
            4 * network.trained / 1e6,
            f"{self.base.parameters:,}",
            base_kl,
        )

    def _rate(self) -> float:
        """The peak learning rate: the one that is set, or the one that Lightning's finder gives, kept for a restart."""
        if self.trainer.lr != "auto":
            return float(self.trainer.lr)
        file = self.work / RATE_FILE
        if file.is_file() and (known := read_json(file)).get("question") == self.question:
            return float(known["lr"])
        if self.trainer.devices > 1:
            raise KvxferError("trainer.lr=auto looks on one device only: find it with trainer.devices=1 and set it")
        lr = find_rate(self._module(self._network(), FINDER_RATES[0]), self._data(), self.trainer, self.work)
        log.info("trainer.lr=auto: %.3g", lr)
        write_json(file, {"lr": lr, "question": self.question})
        return lr

    def _data(self) -> Data:
        return Data(self.schedule, len(self.rows.validation))

    def _fit(self, engine: L.Trainer, module: TrainedModule, recorder: Recorder, checkpoint: Checkpoint | None) -> None:
        done = checkpoint.step if checkpoint else 0
        if checkpoint and (
            done >= self.trainer.max_steps or waited(checkpoint.state["callbacks"], self.trainer.patience)
        ):
            # Killed after its last step.
            recorder.load_state_dict(checkpoint.state["callbacks"][recorder.state_key])
            return
        path = None if checkpoint is None else str(checkpoint.path)
        if not engine.is_global_zero:
            engine.fit(module, datamodule=self._data(), ckpt_path=path)
            return
        with progress("train", self.trainer.max_steps, "steps", done) as advance:
            recorder.advance = advance
            engine.fit(module, datamodule=self._data(), ckpt_path=path)

    def _finish(self, network: Network, recorder: Recorder, known: dict[str, Any]) -> TrainedMap:
        layers, trunks = network.export()
        trained = replace(self.base, layers=layers, trunks=trunks)
        store = self._store(self.rows.held_out, self.trainer.cache_gib * _VALIDATION_SHARE, True)
        held_out = {
            name: report(self.objective, store, mapped_by(self.pair, each), self.schedule)
            for name, each in (("base", self.base), ("trained", trained))
        }
        history = recorder.history
        steps = int(history[-1]["step"])
        record = {
            "steps": steps,
            "seconds": round(recorder.seconds, 1),
            "seconds_per_step": recorder.seconds / steps,
            "stopped": "max_steps" if steps >= self.trainer.max_steps else "patience",
            **known,
            "trained_parameters": network.trained,
            "history": history,
            "layers": recorder.layers,
            "outputs": recorder.outputs,
            "held_out": held_out,
        }
        return TrainedMap(layers, trunks, record, self.question)


def _check_rows(rows: TrainingRows) -> None:
    length = rows.training.tokens.shape[1]
    for name in ("training", "validation", "held_out"):
        found: Rows = getattr(rows, name)
        if not len(found):
            raise KvxferError(f"corpus.rows.{name}=0: a map can't be trained without")
        if found.tokens.shape[1] != length:
            raise KvxferError(f"{name} rows have {found.tokens.shape[1]} tokens, training rows {length}")
    seen: dict[str, str] = {}
    for name in ("training", "validation", "held_out"):
        for document in (key for keys in getattr(rows, name).documents for key in keys):
            if seen.setdefault(document, name) != name:
                raise KvxferError(f"document {document} is in {seen[document]} and {name} rows")
