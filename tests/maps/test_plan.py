"""Which tokens are exact and which are mapped."""

from __future__ import annotations

import pytest

from kvxfer.errors import KvxferError
from kvxfer.maps.plan import Plan


@pytest.mark.parametrize(
    ("first", "held", "prompt", "span"),
    [(4, 1, 100, (4, 99)), (0, 1, 2, (0, 1)), (4, 3, 6, (3, 3)), (4, 1, 5, (4, 4)), (200, 1, 100, (99, 99))],
)
def test_the_mapped_span(first: int, held: int, prompt: int, span: tuple[int, int]) -> None:
    start, stop = Plan(exact_first=first, hold_back=held).mapped_span(prompt)
    assert (start, stop) == span
    assert 0 <= start <= stop == prompt - held


@pytest.mark.parametrize(("prompt", "held"), [(1, 1), (3, 3), (2, 5)])
def test_a_prompt_that_leaves_no_prefix_is_refused(prompt: int, held: int) -> None:
    with pytest.raises(KvxferError, match=rf"plan\.hold_back={held} .*prompt of {prompt} tokens"):
        Plan(hold_back=held).mapped_span(prompt)


@pytest.mark.parametrize(
    ("options", "key"), [({"exact_first": -1}, "plan.exact_first=-1"), ({"hold_back": 0}, "plan.hold_back=0")]
)
def test_wrong_values_are_named(options: dict[str, int], key: str) -> None:
    with pytest.raises(KvxferError, match=key):
        Plan(**options)


def test_what_a_map_has_never_seen_is_not_mapped() -> None:
    for first, skipped in ((0, 0), (4, 0), (4, 4)):
        Plan(exact_first=first).require_seen(skipped)
    with pytest.raises(KvxferError, match=r"plan\.exact_first=3 \(plan=sinks\) .*corpus\.skip_first=4"):
        Plan(exact_first=3).require_seen(4)


def test_variants_change_one_thing() -> None:
    plan = Plan(exact_first=7, hold_back=3)
    assert plan.holding_back(9) == Plan("sinks", 7, 9)
    assert Plan() == Plan("sinks", 4, 1)
