"""The LightningModule: a network, its objective and its optimiser."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.activations import ActivationStore
from kvxfer.fitting.trained.data import Schedule, Step, batches
from kvxfer.fitting.trained.measures import Measures
from kvxfer.fitting.trained.networks import Network
from kvxfer.fitting.trained.objective import Losses, Objective
from kvxfer.fitting.trained.resuming import QUESTION, RATE
from kvxfer.fitting.trained.specs import TrainerSpec
from kvxfer.maps.blocks import KINDS
from kvxfer.models.kv import KV

VAL_KL = "val_kl"
"""What the best checkpoint and early stopping are chosen by."""


class TrainedModule(L.LightningModule):
    """What Lightning trains.

    Args:
        stores: activations of the rows to train and to validate on.
        schedule: which rows a step trains on, and where they are cut.
        lr: the peak learning rate.
        question: the digest of what is asked, for checkpoints.

    Attributes:
        searching: whether a learning rate is looked for, at some of which losses are expected not to be finite.
        validated: the last look at the validation rows.
    """

    def __init__(
        self,
        network: Network,
        objective: Objective,
        stores: tuple[ActivationStore, ActivationStore],
        spec: TrainerSpec,
        schedule: Schedule,
        lr: float,
        question: str,
    ) -> None:
        super().__init__()
        self.network = network
        self.objective, self.spec, self.schedule = objective, spec, schedule
        self.lr, self.question = lr, question
        self.training_store, self.validation_store = stores
        self.searching = False
        self.validated: Measures | None = None
        self.kl = MeanMetric(nan_strategy="error")
        self._batches: list[Measures] = []

    def train_dataloader(self) -> Iterator[Step]:
        """Steps from the trainer's on, which it knows once a checkpoint is loaded; they have no end."""
        for number in itertools.count(self.trainer.global_step):
            yield self.schedule.step(number, self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """All rows on every device, so that all of them stop at the same step."""
        rows: Any = batches(len(self.validation_store), self.schedule.batch_size)
        return DataLoader(rows, batch_size=None)

    def training_step(self, step: Step, number: int) -> dict[str, Any]:
        """The loss, and its terms by name, those of layers and outputs as vectors.

        Raises:
            KvxferError: it is not finite.
        """
        batch = self.training_store.batch(step.rows)
        mapped = self.network(batch.source, batch.known)
        losses = self.objective.losses(batch, mapped, step.split)
        total = self.objective.total(losses)
        if not self.searching and not torch.isfinite(total):
            raise KvxferError(self._not_finite(step.number, mapped, losses))
        terms = {"attention": losses.attention, "kl": losses.kl, "mse": losses.mse}
        return {"loss": total, "terms": {name: term.detach() for name, term in terms.items() if term is not None}}

    def validation_step(self, rows: list[int], number: int) -> None:
        """Measure a batch.

        Raises:
            KvxferError: the KL is not finite. No checkpoint of such weights is written.
        """
        batch = self.validation_store.batch(rows)
        mapped = self.network(batch.source, batch.known)
        found = self.objective.measures(batch, mapped, self.schedule.half)
        if not math.isfinite(found.kl):
            raise KvxferError(self._not_finite(self.global_step, mapped, None))
        self.kl.update(found.kl, weight=found.tokens)
        self._batches.append(found)

    def on_validation_epoch_end(self) -> None:
        """Close the measures, and tell Lightning the one that decides."""
        self.validated = Measures.over(self._batches)
        self._batches = []
        self.log(VAL_KL, self.kl)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.lr, weight_decay=self.spec.weight_decay)
        schedule = LambdaLR(optimizer, lambda step: learning_rate(self.spec, step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what tells whose the checkpoint is."""
        checkpoint |= {QUESTION: self.question, RATE: self.lr}

    def _not_finite(self, step: int, mapped: KV, losses: Losses | None) -> str:
        """Where a number that is not finite comes from, and what can be done."""
        kept = self.trainer.checkpoint_callbacks
        last = getattr(kept[-1], "best_model_path", "") if kept else ""
        where = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        return (
            f"training stopped at step {step}: {culprit(mapped, losses, self.objective.layers)} is not finite; "
            f"{where}; lower trainer.lr or trainer.gradient_clip, or set trainer.precision=32-true"
        )


def learning_rate(spec: TrainerSpec, step: int) -> float:
    """The share of the peak learning rate at a step (from 0): it rises over the warm-up, then stays or falls to 0."""
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - spec.warmup_steps) / max(spec.max_steps - spec.warmup_steps, 1)))


def culprit(mapped: KV, losses: Losses | None, layers: Sequence[int]) -> str:
    """The first thing that is not finite: mapped content by layer and kind, else a term of the loss over ``layers``."""
    for layer in range(mapped.layers):
        for kind in KINDS:
            if not torch.isfinite(getattr(mapped, kind)[layer]).all():
                return f"what is mapped as {kind} of layer {layer}"
    if losses is None:
        return "next-token KL of the validation rows"
    if losses.attention is not None and not torch.isfinite(losses.attention).all():
        return f"the loss of layer {layers[_first(losses.attention)]}'s attention output"
    if losses.mse is not None and not torch.isfinite(losses.mse).all():
        number, which = divmod(_first(losses.mse), len(KINDS))
        return f"the squared error of {KINDS[which]} of layer {layers[number]}"
    if losses.kl is not None and not torch.isfinite(losses.kl):
        return "the loss of next-token KL"
    return "the loss"


def _first(values: Tensor) -> int:
    return int((~torch.isfinite(values)).nonzero()[0])
