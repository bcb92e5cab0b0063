"""Auto: several solvers fit, and the attention-output error on the probe decides between their maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.attention import map_scores
from kvxfer.fitting.closed.judges import required_probe
from kvxfer.fitting.closed.registry import CLOSED_FORMS
from kvxfer.fitting.closed.selection import Selection
from kvxfer.fitting.closed.solver import Fit, Solver, Splits
from kvxfer.fitting.dials import AutoDials
from kvxfer.maps.blocks import KINDS, Output
from kvxfer.moments.moments import Moments
from kvxfer.moments.probe import Probe


@dataclass(frozen=True)
class Auto(AutoDials):
    """The best of some solvers, each with the same dials."""

    name: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.candidates:
            if name not in CLOSED_FORMS:
                raise KvxferError(f"solver.candidates has {name!r}, which is none of {', '.join(CLOSED_FORMS)}")
        self._applicable()

    @property
    def needs_probe(self) -> bool:
        """It decides on the probe."""
        return True

    @property
    def needs_weights(self) -> bool:
        """Whether a candidate does."""
        return any(solver.needs_weights for solver in self._applicable()[0].values())

    def steps(self, moments: Moments) -> int:
        """Those of all candidates."""
        return sum(solver.steps(moments) for solver in self._applicable()[0].values())

    def fit(self, splits: Splits, advance: Callable[[], None] = lambda: None) -> Fit:
        """Fit every candidate, then keep the best for all or for each target layer and kind."""
        probe = required_probe(splits.probe, "solver=auto")
        solvers, errors = self._applicable()
        fits: dict[str, Fit] = {}
        for name, solver in solvers.items():
            try:
                fits[name] = _fit(solver, splits, advance)
            except KvxferError as error:
                errors[name] = error
        if not fits:
            raise next(iter(errors.values()))
        # In the order that was given, which decides between equal scores.
        scores = {name: _means(fits[name]) for name in self.candidates if name in fits}
        known: dict[str, dict[str, Any]] = {name: {"left_out": str(error)} for name, error in errors.items()}
        known |= scores
        return _joined(fits, self._winners(fits, scores), probe, {name: known[name] for name in self.candidates})

    def _applicable(self) -> tuple[dict[str, Solver], dict[str, KvxferError]]:
        """The candidates that these dials allow, and why the others are left out; an error if none is left."""
        own = ("name", "candidates", "choose")
        dials = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in own}
        found: dict[str, Solver] = {}
        errors: dict[str, KvxferError] = {}
        for name in self.candidates:
            try:
                found[name] = CLOSED_FORMS[name](**dials)
            except KvxferError as error:
                errors[name] = error
        if not found:
            raise next(iter(errors.values()))
        return found, errors

    def _winners(self, fits: dict[str, Fit], scores: dict[str, dict[str, float]]) -> dict[Output, str]:
        """Which candidate gives each output."""
        outputs = list(next(iter(fits.values())).layers)
        if self.choose == "one":
            return dict.fromkeys(outputs, max(scores, key=lambda name: scores[name]["attention_joint"]))
        records = {name: _by_output(fits[name]) for name in scores}
        return {o: max(scores, key=lambda name: records[name][o]["attention_score"]) for o in outputs}


def _fit(solver: Solver, splits: Splits, advance: Callable[[], None]) -> Fit:
    """The candidate's fit; one that fails on its way still counts as all its steps."""
    left = solver.steps(splits.fit)

    def count() -> None:
        nonlocal left
        left -= 1
        advance()

    try:
        return solver.fit(splits, count)
    finally:
        for _ in range(left):
            advance()


def _by_output(fit: Fit) -> dict[Output, dict[str, Any]]:
    return {(record["layer"], record["kind"]): record for record in fit.diagnostics}


def _means(fit: Fit) -> dict[str, float]:
    """A candidate's mean scores over target layers: each kind by itself, and both together."""
    found = {}
    for kind in KINDS:
        own = [record["attention_score"] for record in fit.diagnostics if record["kind"] == kind]
        found[f"attention_{kind}"] = sum(own) / len(own)
    joint = [record["attention_score_joint"] for record in fit.diagnostics]
    return {**found, "attention_joint": sum(joint) / len(joint)}


def _joined(
    fits: dict[str, Fit], winners: dict[Output, str], probe: Probe, candidates: dict[str, dict[str, Any]]
) -> Fit:
    """The winners' layers as one map, scored as one; every record says what each candidate scored."""
    layers = {output: fits[name].layers[output] for output, name in winners.items()}
    own = {name: _by_output(fit) for name, fit in fits.items()}
    together = map_scores(layers, probe)
    # A table's rows have the same columns, whichever candidate they are from.
    keys = dict.fromkeys(key for fit in fits.values() for record in fit.diagnostics for key in record)
    diagnostics = [
        {
            **dict.fromkeys(keys),
            **own[name][output],
            **together[output],
            "solver": name,
            **{f"attention_score_{each}": own[each][output]["attention_score"] for each in candidates if each in own},
        }
        for output, name in winners.items()
    ]
    curves: dict[str, Any] = {}
    for dial in ("penalty", "rank", "k_outputs"):
        per_output = {f"{o[1]}.{o[0]}": fits[name].curves.get(dial, {}) for o, name in winners.items()}
        curves[dial] = {output: found[output] for output, found in per_output.items() if output in found}
    curves["k_candidates"] = {name: fit.curves["k"] for name, fit in fits.items() if "k" in fit.curves}
    return Fit(layers, _selection(fits, winners), diagnostics, {k: v for k, v in curves.items() if v}, candidates)


def _selection(fits: dict[str, Fit], winners: dict[Output, str]) -> Selection:
    """What the winners chose, and the scores behind it."""
    first = next(iter(fits.values())).selection
    rows = {kind: [fits[winners[o]].selection.scores[kind][o[0]] for o in winners if o[1] == kind] for kind in KINDS}
    return replace(
        first,
        scores={kind: torch.stack(scores) for kind, scores in rows.items()},
        chosen={output: fits[name].selection.chosen[output] for output, name in winners.items()},
    )
