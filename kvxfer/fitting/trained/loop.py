"""A training from start to end: pair, base map and rows in, the layers and trunks of a map out."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from kvxfer.errors import KvxferError
from kvxfer.files import read_json, write_json
from kvxfer.fitting.trained.activations import ActivationStore
from kvxfer.fitting.trained.callbacks import Recorder, StepLog, all_callbacks, waited
from kvxfer.fitting.trained.data import Schedule, batches
from kvxfer.fitting.trained.engine import FINDER_RATES, find_rate, make_trainer, move, quiet
from kvxfer.fitting.trained.measures import Measures
from kvxfer.fitting.trained.module import TrainedModule
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
from kvxfer.fitting.trained.specs import Trained, TrainerSpec
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.content_errors import MappedErrors
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
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
            (see :class:`kvxfer.fitting.trained.callbacks.Recorder`), and ``held_out``: of ``base`` and ``trained`` the
            ``kl`` (nats per token), ``cosine`` and ``attention_score`` (means over target layers), ``layers`` (both
            for each ``layer``) and ``r2`` (for each ``layer`` and ``kind``).
        question: names what was trained on what; checkpoints of it go on from one another.
    """

    layers: dict[Output, LinearLayer]
    trunks: tuple[Trunk, ...]
    record: dict[str, Any]
    question: str


@dataclass
class Fitting:
    """The training of a map beside or in place of a base.

    With several devices, every process runs it and all return the same; the first alone writes and logs.

    Args:
        exact: how many first tokens of a row are always the target's own.
        work: where checkpoints are kept.

    Raises:
        KvxferError: settings or rows that do not fit.
    """

    pair: Pair
    base: CacheMap
    spec: Trained
    trainer: TrainerSpec
    rows: TrainingRows
    exact: int
    work: Path
    out: StepLog

    def __post_init__(self) -> None:
        _check_rows(self.rows)
        training, validation, gib = self.rows.training, self.rows.validation, self.trainer.cache_gib
        length, digests = training.tokens.shape[1], [training.digest, validation.digest]
        self.schedule = Schedule(len(training), length, self.exact, self.trainer.batch_size, self.trainer.seed)
        self.outputs = trained_outputs(self.base, self.spec)
        self.question = question(self.spec, self.trainer, self.base.hash, digests, self.exact)
        self.objective = Objective(self.pair, self.spec, self.exact)
        self.training = self._store(training, gib * (1 - _VALIDATION_SHARE), self.spec.kl > 0)
        self.validation = self._store(validation, gib * _VALIDATION_SHARE, True)

    @quiet()
    def run(self) -> TrainedMap:
        """Train, or go on where a killed process was, and measure what came of it.

        Raises:
            KvxferError: a checkpoint of another question, or a loss that is not finite.
        """
        recorder = Recorder(self.trainer)
        callbacks = all_callbacks(recorder, self.trainer, self.work / CHECKPOINTS)
        engine = make_trainer(self.trainer, self.pair.target.device, self.work, callbacks)
        first = engine.is_global_zero
        move(self.pair, engine.strategy.root_device)
        checkpoint = find_checkpoint(self.trainer.ckpt_path, self.work / CHECKPOINTS, self.question, first)
        if first:
            log.info("%s: the base map is measured on %d validation rows", self.spec.name, len(self.rows.validation))
        started = time.monotonic()
        base_kl = self._report(self.validation, self.base)["kl"]
        recorder.look_seconds = time.monotonic() - started
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
        self.training.forget()
        self.validation.forget()
        return self._finish(network, recorder, {"lr": lr, "base_val_kl": base_kl, "best_step": best_step})

    def _store(self, rows: Rows, cache_gib: float, logits: bool) -> ActivationStore:
        return ActivationStore(self.pair, self.base.blocks, rows.tokens, cache_gib, logits)

    def _network(self) -> Network:
        device = self.pair.target.device
        random = None if self.base.random is None else self.base.random.to(device)
        scales = Scales(self.base.blocks, self.outputs, self.schedule.exact, random)
        for some in batches(min(SCALE_ROWS, self.schedule.rows), self.trainer.batch_size):
            batch = self.training.batch(some)
            scales.add(batch.source, batch.known, batch.own)
        return make_network(self.base, self.spec, scales, self.trainer.seed, device)

    def _module(self, network: Network, lr: float) -> TrainedModule:
        stores = self.training, self.validation
        return TrainedModule(network, self.objective, stores, self.trainer, self.schedule, lr, self.question)

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
        lr = find_rate(self._module(self._network(), FINDER_RATES[0]), self.trainer, self.work)
        log.info("trainer.lr=auto: %.3g", lr)
        write_json(file, {"lr": lr, "question": self.question})
        return lr

    def _fit(self, engine: L.Trainer, module: TrainedModule, recorder: Recorder, checkpoint: Checkpoint | None) -> None:
        done = checkpoint.step if checkpoint else 0
        if checkpoint and (
            done >= self.trainer.max_steps or waited(checkpoint.state["callbacks"], self.trainer.patience)
        ):
            # Killed after its last step.
            recorder.load_state_dict(checkpoint.state["callbacks"][recorder.state_key])
            return
        path = None if checkpoint is None else str(checkpoint.path)
        bar = progress("train", self.trainer.max_steps, "steps", done) if engine.is_global_zero else nullcontext()
        with bar as recorder.advance:
            engine.fit(module, ckpt_path=path)

    def _finish(self, network: Network, recorder: Recorder, known: dict[str, Any]) -> TrainedMap:
        layers, trunks = network.export()
        trained = replace(self.base, layers=layers, trunks=trunks)
        store = self._store(self.rows.held_out, self.trainer.cache_gib * _VALIDATION_SHARE, True)
        held_out = {"base": self._report(store, self.base), "trained": self._report(store, trained)}
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

    @torch.inference_mode()
    def _report(self, store: ActivationStore, cache_map: CacheMap) -> dict[str, Any]:
        """A map, in float32, on all rows of a store: as a training validates, and R² as a fit records it."""
        mapper = Mapper(cache_map, self.pair.target.device, pair=self.pair)
        found, errors = [], MappedErrors(mapper.layers)
        for rows in batches(len(store), self.schedule.batch_size):
            batch = store.batch(rows)
            mapped = mapper.map(batch.source, batch.ids)
            errors.add(batch.own, mapped, self.schedule.exact, self.schedule.length)
            found.append(self.objective.measures(batch, mapped, self.schedule.half))
        measures = Measures.over(found)
        cosine, score = measures.cosine.tolist(), measures.attention_score.tolist()
        layers = enumerate(zip(cosine, score, strict=True))
        return {
            "kl": measures.kl,
            "cosine": sum(cosine) / len(cosine),
            "attention_score": sum(score) / len(score),
            "layers": [{"layer": n, "cosine": c, "attention_score": s} for n, (c, s) in layers],
            "r2": [{"layer": n, "kind": k, "r2": each.r2()} for (n, k), each in sorted(errors.by_output.items())],
        }


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
