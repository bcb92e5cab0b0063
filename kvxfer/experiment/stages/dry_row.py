"""One row through all that a calibration pass, and every stage that was asked for after it, will need of a pair.

A pass may take hours. What a pair can't do is told before it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.evaluation import Evaluation
from kvxfer.evals.gates import TOLERANCE
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.experiment.settings import CalibrateSettings, EvaluateSettings, TrainSettings
from kvxfer.fitting.closed.selection import check_k
from kvxfer.maps.columns import TargetTokens, read_source
from kvxfer.models.hf.observing import TRAINED_INSTEAD
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import layout_for
from kvxfer.text.corpus import Rows

_TOKENS = 64
_METRICS = "calibration.metrics=false"
_OWN = 4
"""How many times the tolerance of a gate one row may be off by the models' own rounding: SmolLM2 in bfloat16 is off by
0.03 to 0.06 nats."""


def refuse_unfit(settings: CalibrateSettings, pair: Pair) -> None:
    """Refuse what no map of this pair can be, and what a map of it can't be asked."""
    if isinstance(settings, EvaluateSettings) and isinstance(settings.eval, Evaluation):
        settings.eval.check(pair, settings.corpus, settings.plan)
    if not isinstance(settings, TrainSettings):
        return
    solver: Any = settings.solver
    if isinstance(solver.k, int) and solver.method != "all":
        check_k(solver.k, settings.calibration.source_layers(pair.source.geometry.layers))
    target = pair.target.geometry
    # The ranks are not used here: too large a one is refused. What auto leaves out decides nothing.
    solver.rank.ranks(solver.rank_width(target.kv_width, target.kv_heads))


def try_row(settings: CalibrateSettings, pair: Pair, rows: dict[str, Rows]) -> None:
    """Refuse, with the setting that does without where there is one, what this pair can't do with these rows."""
    for part in rows.values():
        for model in (pair.source, pair.target):
            model.check_ids(part.tokens)
    given = next((part.tokens[:1, :_TOKENS] for part in rows.values() if len(part)), None)
    if given is None:
        return
    blocks = layout_for(pair, settings.calibration).blocks
    read_source(pair, given, blocks)
    TargetTokens.of(pair, given, blocks)
    _try_attention(settings, pair, given)
    _try_handoff(pair, given)


def _try_attention(settings: CalibrateSettings, pair: Pair, row: Int[Tensor, "1 tokens"]) -> None:
    """What metrics, weights, a probe and training look at in the target's attention."""
    spec, target = settings.calibration, pair.target
    if spec.metrics:
        target.output_projections(_METRICS)
        target.queries(row)
    if spec.weights != "none":
        target.check_softmax("calibration.weights=none")
    if spec.probe_rows:
        target.check_softmax("calibration.probe_rows=0")
    if isinstance(settings, TrainSettings) and settings.training is not None:
        # As heavy as training itself, and a closed form needs none of it.
        from kvxfer.fitting.trained.objective import Objective

        Objective(pair, settings.training.spec, settings.corpus.skip_first)
        target.check_softmax(TRAINED_INSTEAD)


def _try_handoff(pair: Pair, row: Int[Tensor, "1 tokens"]) -> None:
    """The target goes on from its own cache, and from that taken through content space, as from its own reading."""
    cut, target, dtype = row.shape[1] // 2, pair.target, pair.target.dtype
    head, tail, answer = row[:, :cut], row[:, cut : cut + 1], row[:, cut + 1 :]
    if not head.shape[1] or not answer.shape[1]:
        return
    own = target.prefill(head)
    through = pair.rotated("target", pair.content("target", own))
    plain, handed, turned = (
        token_log_likelihoods(prepared, answer)
        for prepared in (
            Prepared(target, None, row[:, : cut + 1]),
            Prepared(target, own, tail),
            Prepared(target, through, tail),
        )
    )
    # A low precision differs by itself from one reading to two, more on one short row than on a batch of answers.
    checks = {
        "": (plain, handed, _OWN * TOLERANCE[dtype]),
        ", taken through content space,": (handed, turned, TOLERANCE[dtype]),
    }
    for which, (before, after, allowed) in checks.items():
        off = float((before - after).abs().mean())
        # Not a number where a row is not: such rows are counted by the pass itself.
        if off > allowed and torch.isfinite(plain).all():
            raise KvxferError(
                f"{target.name}: going on from its own cache{which} changes a token's score by {off:.2g} nats, at most "
                f"{allowed:.2g} is expected in {pair.spec.dtype}; try pair.dtype=float32"
            )
