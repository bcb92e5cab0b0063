"""What results.json holds, and how its numbers and names are written for a reader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import KvxferError

SCHEMA = 1
NOTHING = "\N{EN DASH}"
Number = float | int
REQUIRED_CONDITIONS = ("ceiling", "source", "mapped", "floor", "raw_copy", "no_context")

# One line per key that must be present; "*" stands for every key of that object. All but "schema" may be null where a
# task has no such quantity. Objects may hold more keys than these.
RESULTS_SCHEMA: dict[str, str] = {
    "schema": "1",
    "run_id": "id of the evaluation run",
    "title": "what was evaluated, for a heading",
    "pair": "source and target, revisions, dtype, direction",
    "map": "run_id, sha256, solver, penalty, lam, rank, features, k, parameters, bytes, flops_per_token, "
    "bytes_read_per_token (source cache and whatever else the map reads, as bfloat16), bytes_written_per_token "
    "(target cache), and share_of_prefill_flops (share of the target's prefill FLOPs per token)",
    "conditions": "by name: ceiling, source, mapped, floor, raw_copy, no_context; with eval.conditions=all also "
    "mapped_all, wrong_donor and others",
    "conditions.*.accuracy": "share of items answered right by log-likelihood, 0 to 1",
    "conditions.*.accuracy_ci": "[low, high], 95 %: Wilson, widened to the bootstrap over documents",
    "conditions.*.perplexity": "exp of nats",
    "conditions.*.nats": "negative log-likelihood per scored token",
    "conditions.*.nats_ci": "[low, high], 95 %, bootstrap over documents",
    "conditions.*.generated": "share of items whose generated answer is right",
    "conditions.*.retention": "accuracy / ceiling's accuracy (retention_ci: its interval, as for the next three)",
    "conditions.*.retention_floor_normalised": "(accuracy - chance) / (ceiling - chance)",
    "conditions.*.gap_recovered": "(accuracy - source) / (ceiling - source), null without a gap",
    "conditions.*.gap_recovered_nats": "(source - nats) / (source - ceiling), null without a gap",
    "conditions.*.n": "items",
    "tests": "mapped_vs_source, mapped_vs_ceiling, and both of mapped_all if it was scored: first minus second; "
    "mapped_vs_ancestor_copy where the source was pruned from the target (results then have ancestry too)",
    "tests.mapped_vs_source": "the comparison that decides",
    "tests.*.accuracy_p": "exact McNemar, two-sided, over items",
    "tests.*.accuracy_difference": "difference of accuracies (> 0: first is better)",
    "tests.*.accuracy_ci": "its 95 % interval, paired bootstrap over documents",
    "tests.*.nll_p": "paired t-test over documents' nats per token, two-sided",
    "tests.*.nll_difference": "difference of nats per token (< 0: first is better)",
    "tests.*.nll_ci": "its 95 % interval, paired bootstrap over documents",
    "tests.*.n": "items",
    "tests.*.documents": "documents",
    "by_kind": "accuracy by kind of item and condition, {} without kinds",
    "tables": "further tables by name, as story_only, each with conditions and tests",
    "tables.*.conditions": "as conditions, of those conditions that the table has",
    "tables.*.tests": "as tests",
    "gates": "[{name, value, tolerance, passed}]",
    "fit_check": "R² on this text against what the fit reported: outputs [{layer, kind, r2, recorded, drop}], worst "
    "(one of them), below (those that drop by more than tolerated), tolerated, tokens, passed; null without a record",
    "selection": "r2_keys, r2_values [target layers][source layers], chosen_keys, chosen_values [target layers][k]",
    "chance": "accuracy of guessing, 0 to 1",
    "items": "per-item scores: id, document, kind, chance, correct, nats (sum over tokens), tokens, generated",
    "provenance": "versions, commit, inputs and their ids",
}
GATE_KEYS = ("name", "value", "tolerance", "passed")


def require_keys(results: Any, schema: Mapping[str, str], path: str = "") -> None:
    """Raise KvxferError naming the first of a schema's keys that is missing from ``results``, which lie at ``path``."""
    for key, said in schema.items():
        _require(results, path, key, said)


def _require(results: Any, path: str, key: str, said: str) -> None:
    """KvxferError when a dotted key (with ``*`` for all) is missing below ``results``; ``said`` is what it holds."""
    head, _, rest = key.partition(".")
    if not isinstance(results, Mapping):
        if results is None and path:
            return
        raise KvxferError(f"results.json: {path or 'the file'} must be an object and is {type(results).__name__}")
    for name in results if head == "*" else (head,):
        full = f"{path}.{name}" if path else name
        if name not in results:
            raise KvxferError(f"results.json: key {full} is missing ({said})")
        if rest:
            _require(results[name], full, rest, said)


def validate_results(results: Mapping[str, Any]) -> None:
    """Raise KvxferError naming the first key that results.json (or a comparison of designs) lacks."""
    require_keys(results, RESULTS_SCHEMA)
    if results["schema"] != SCHEMA:
        raise KvxferError(
            f"results.json: schema is {results['schema']} and this version reads {SCHEMA}; evaluate again"
        )
    for condition in REQUIRED_CONDITIONS:
        _require(results, "", f"conditions.{condition}", "a condition that every evaluation has")
    for index, gate in enumerate(results["gates"]):
        for key in GATE_KEYS:
            _require(gate, f"gates.{index}", key, RESULTS_SCHEMA["gates"])
    for name, design in results.get("designs", {}).items():
        try:
            validate_results(design)
        except KvxferError as error:
            raise KvxferError(f"design {name}: {error}") from error
    if "designs" in results and results.get("best") not in results["designs"]:
        raise KvxferError(
            f"results.json: best is {results.get('best')} and the designs are {', '.join(results['designs'])}; name one"
        )


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: Number | None) -> str:
    """0.931 as ``93.1 %``; an en dash for nothing."""
    return NOTHING if value is None else _signed(f"{100 * value:.1f} %")


def points(value: Number | None) -> str:
    """A signed difference of shares in percentage points."""
    return NOTHING if value is None else _signed(f"{100 * value:+.1f} pp")


def number(value: Number | None, decimals: int = 3, sign: bool = False) -> str:
    """A plain number with fixed decimals."""
    return NOTHING if value is None else _signed(f"{value:{'+' if sign else ''}.{decimals}f}")


def perplexity(value: Number | None) -> str:
    """Three significant digits, thousands grouped, no exponent."""
    if value is None:
        return NOTHING
    if value >= 1e6:
        return "> 10\N{SUPERSCRIPT SIX}"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(rounded)) if rounded > 0 else 2
    return f"{rounded:,.{max(0, digits)}f}"


def p_value(value: Number | None) -> str:
    """``< 0.001``, three decimals below 0.1, two above."""
    if value is None:
        return NOTHING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.0995 else f"{value:.2f}"


def p_text(value: Number) -> str:
    """``p < 0.001`` or ``p = 0.023``."""
    text = p_value(value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def interval(ci: Sequence[Number] | None, form: str = "percent") -> str:
    """``[91.3, 94.6]`` in percent, or with three decimals (``form="number"``)."""
    if ci is None:
        return ""
    scale, decimals = (100, 1) if form == "percent" else (1, 3)
    return _signed(f"[{scale * ci[0]:.{decimals}f}, {scale * ci[1]:.{decimals}f}]")


def quantity(value: Number | None, unit: str = "") -> str:
    """A count with three significant digits and a prefix: 1,234,567 as ``1.23 M``."""
    if value is None:
        return NOTHING
    value = float(f"{value:.3g}")
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def setting(value: Any) -> str:
    """A config value: floats with three significant digits, as 1.23e-03 where that takes more than four decimals."""
    if value is None:
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.3g}"
    return f"{value:.2e}" if len(text.partition(".")[2]) > 4 else text
