"""Numbers as a reader wants them."""

from __future__ import annotations

import pytest

from kvxfer.report.numbers import interval, number, p_value, percent, perplexity, quantity, setting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.45, "123"),
        (1234.5, "1,230"),
        (9.999, "10.0"),
        (3e7, "> 10⁶"),
        (None, "\N{EN DASH}"),
    ],
)
def test_perplexity_has_three_digits(value, text):
    assert perplexity(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.2e-17, "< 0.001"), (0.0234, "0.023"), (0.0996, "0.10"), (0.5, "0.50"), (1.0, "1.00")],
)
def test_p_values(value, text):
    assert p_value(value) == text


def test_other_numbers():
    assert percent(0.93149) == "93.1 %"
    assert percent(-0.05) == "\N{MINUS SIGN}5.0 %"
    assert interval([-0.0312, 0.4567]) == "[\N{MINUS SIGN}3.1, 45.7]"
    assert [setting(v) for v in (0.001, 1e-5, 0.00123456, "auto", 8)] == ["0.001", "1e-05", "1.23e-03", "auto", "8"]
    assert number(-0.12345) == "\N{MINUS SIGN}0.123"
    assert [quantity(v, "B") for v in (12, 999_999, 4_938_268, 2.5e9)] == ["12 B", "1 MB", "4.94 MB", "2.5 GB"]
