"""What happens beside the steps: records, progress, checkpoints, and the end of a training that gains nothing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from kvxfer.fitting.trained.module import VAL_KL, TrainedModule
from kvxfer.fitting.trained.resuming import BEST, LAST
from kvxfer.fitting.trained.specs import TrainerSpec
from kvxfer.maps.blocks import KINDS

log = logging.getLogger("kvxfer")

AXIS = "trainer/step"
LAYER_TABLE, OUTPUT_TABLE = "training_layers", "training_outputs"
_TIMED = 3


@runtime_checkable
class StepLog(Protocol):
    """What is told of the steps while they go on; a run's logger is one."""

    def metrics(self, values: dict[str, Any], axis: str | None = None) -> None:
        """Numbers by name; ``axis`` is the key among them that the others are drawn over."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A whole table; the same name again replaces it."""


class Recorder(L.Callback):
    """Tells the run's logger, the log and the record what training does; its state is part of every checkpoint.

    Attributes:
        out: the run's logger; None for a process that writes nothing.
        look_seconds, rest_seconds: what a look at the validation rows takes, and what follows the training.
        advance: called with the number of steps that are done, if there is somebody to tell.
        history: one entry for each look at the validation rows: ``step``, means of the loss and its terms since the
            last look (over the first device's share of the rows), ``lr``, ``val_kl``, ``val_cosine_mean`` and
            ``val_score_mean``.
        layers: for every look and target layer the attention loss, and the cosine and score on the validation rows.
        outputs: for every look, target layer and kind the squared error, where it is part of the loss.
        seconds: of training, those before a kill included.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.out: StepLog | None = None
        self.look_seconds = self.rest_seconds = 0.0
        self.advance: Callable[[int], None] | None = None
        self.history: list[dict[str, Any]] = []
        self.layers: list[dict[str, Any]] = []
        self.outputs: list[dict[str, Any]] = []
        self.seconds = 0.0
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._clock = self._timed = time.monotonic()
        self._begun, self._lr = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain types alone, as loading a checkpoint without executing code wants them."""
        names = ("history", "layers", "outputs")
        return {**{name: getattr(self, name) for name in names}, "seconds": self.seconds + self._since()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock, self._begun = time.monotonic(), trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds, self._clock = self.seconds + self._since(), time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The last step is always followed by a look, or what came after the one before would be lost."""
        if trainer.global_step == self.spec.max_steps - 1:
            trainer.val_check_batch = 1

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the learning rate, which is the next step's when this one has ended."""
        self._lr = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step's loss, and once some steps are timed, how long all will take."""
        found = {"loss": outputs["loss"].detach(), **outputs["terms"]}
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        self._count += 1
        if self.out is not None:
            values = {f"train/{name}": float(value.mean()) for name, value in found.items()}
            self.out.metrics({AXIS: trainer.global_step, **values, "train/lr": self._lr}, AXIS)
        self._estimate(trainer.global_step)
        if self.advance is not None:
            self.advance(1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a look to the history and to the tables."""
        assert isinstance(pl_module, TrainedModule)
        found = pl_module.validated
        if found is None or not self._count:
            return
        step, trained = trainer.global_step, pl_module.objective.layers
        means = {name: value / self._count for name, value in self._sums.items()}
        self._sums, self._count = {}, 0
        cosine, score = found.cosine.tolist(), found.attention_score.tolist()
        self.history.append(
            {
                "step": step,
                **{name: float(value.mean()) for name, value in means.items()},
                "lr": self._lr,
                "val_kl": found.kl,
                "val_cosine_mean": sum(cosine) / len(cosine),
                "val_score_mean": sum(score) / len(score),
            }
        )
        attention = dict(zip(trained, means["attention"].tolist(), strict=True)) if "attention" in means else {}
        for layer, values in enumerate(zip(cosine, score, strict=True)):
            loss = {"attention_loss": attention.get(layer)}
            looks = dict(zip(("val_cosine", "val_score"), values, strict=True))
            self.layers.append({"step": step, "layer": layer, **loss, **looks})
        for n, value in enumerate(means["mse"].tolist() if "mse" in means else ()):
            layer, kind = divmod(n, len(KINDS))
            self.outputs.append({"step": step, "layer": trained[layer], "kind": KINDS[kind], "mse_loss": value})
        self._tell(step)

    def _tell(self, step: int) -> None:
        if self.out is None:
            return
        entry = self.history[-1]
        self.out.metrics({AXIS: step, **{f"validation/{k[4:]}": v for k, v in entry.items() if k[:4] == "val_"}}, AXIS)
        for name, rows in ((LAYER_TABLE, self.layers), (OUTPUT_TABLE, self.outputs)):
            if rows:
                self.out.table(name, list(rows[0]), [list(row.values()) for row in rows])
        best = min(self.history, key=lambda look: look[VAL_KL])
        log.info(
            "step %d of %d: loss %.4g, validation KL %.4f%s, attention-output cosine %.4f",
            step,
            self.spec.max_steps,
            entry["loss"],
            entry[VAL_KL],
            " (best)" if best is entry else f" (best {best[VAL_KL]:.4f} at {best['step']})",
            entry["val_cosine_mean"],
        )

    def _estimate(self, step: int) -> None:
        """Say how long training will take, from the steps after the first, which also warms up."""
        done = step - self._begun
        if done == 1:
            self._timed = time.monotonic()
        if done != _TIMED or self.out is None:
            return
        each = (time.monotonic() - self._timed) / (_TIMED - 1)
        left = self.spec.max_steps - step
        looks = math.ceil(left / self.spec.validate_every)
        total = each * left + looks * self.look_seconds + self.rest_seconds
        log.info(
            "training: about %s for %d steps (%.2f s each) that are validated %d times (%.1f s each), and a report",
            f"{total / 60:.0f} minutes" if total >= 90 else f"{total:.0f} s",
            left,
            each,
            looks,
            self.look_seconds,
        )

    def _since(self) -> float:
        return time.monotonic() - self._clock


class Kept(ModelCheckpoint):
    """One checkpoint: of the best look at the validation rows, or of the last. It may lie elsewhere when it is loaded.

    Args:
        file: where it is kept.
        monitor: what the best is the lowest of; it holds weights alone, a third of what Adam makes of them. None: every
            look's is kept in place of the one before, with all that going on needs.
    """

    def __init__(self, file: Path, monitor: str | None) -> None:
        super().__init__(
            file.parent,
            filename=file.stem,
            monitor=monitor,
            save_top_k=1,
            save_weights_only=monitor is not None,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.file = str(Path(str(self.dirpath)) / file.name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state over as if the checkpoint had always lain here."""
        score = state_dict["best_model_score"]
        here = {"dirpath": self.dirpath, "best_model_path": self.file, "kth_best_model_path": self.file}
        super().load_state_dict({**state_dict, **here, "best_k_models": {} if score is None else {self.file: score}})


def all_callbacks(recorder: Recorder, spec: TrainerSpec, folder: Path) -> list[L.Callback]:
    """In this order: a checkpoint holds what the others know of its look, and the last one is written last."""
    stopping = [] if spec.patience is None else [early_stopping(spec.patience)]
    return [recorder, *stopping, Kept(folder / BEST, VAL_KL), Kept(folder / LAST, None)]


def early_stopping(patience: int) -> EarlyStopping:
    """The end after so many looks without a lower validation KL; one that is not finite is an error of its own."""
    return EarlyStopping(VAL_KL, patience=patience, check_finite=False, verbose=False)


def waited(callbacks: dict[str, Any], patience: int | None) -> bool:
    """Whether the callbacks' states in a checkpoint say that the training ended for want of progress."""
    if patience is None:
        return False
    state = callbacks.get(early_stopping(patience).state_key, {})
    return int(state.get("wait_count", 0)) >= patience
