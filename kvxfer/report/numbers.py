"""How numbers are written for a reader: few digits, one way everywhere, an en dash for nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "\N{EN DASH}"
Number = float | int


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


def percent_in(row: Mapping[str, Any], key: str) -> str:
    """A row's share with its interval, ``<key>_ci``."""
    return f"{percent(row[key])} {interval(row.get(f'{key}_ci'))}".rstrip()


def number_in(row: Mapping[str, Any], key: str) -> str:
    """A row's number with its interval, ``<key>_ci``."""
    return f"{number(row[key])} {interval(row.get(f'{key}_ci'), 'number')}".rstrip()


def difference(test: Mapping[str, Any], key: str, share: bool) -> tuple[str, str, str]:
    """A paired test's cells: ``<key>_difference`` (of shares in points), ``<key>_ci`` and ``<key>_p``."""
    value, ci, p = (test[f"{key}_{name}"] for name in ("difference", "ci", "p"))
    said = points(value) if share else number(value, sign=True)
    return said, interval(ci, "percent" if share else "number"), p_value(p)


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
