"""Batches and learning rates are functions of the seed and the step alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.data import Schedule, batches
from kvxfer.fitting.trained.module import learning_rate
from kvxfer.fitting.trained.specs import TrainerSpec

SCHEDULE = Schedule(rows=7, length=32, exact=2, batch_size=4, seed=5)


def test_every_pass_reads_every_row_once_in_an_order_of_its_own() -> None:
    read = [row for number in range(21) for row in SCHEDULE.step(number).rows]
    passes = [read[first : first + 7] for first in range(0, len(read), 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) > 10
    assert SCHEDULE.step(20) == SCHEDULE.step(20)
    assert SCHEDULE.step(3) != replace(SCHEDULE, seed=6).step(3)


def test_cuts_are_of_the_two_quarters_between() -> None:
    cuts = Counter(SCHEDULE.step(number).split for number in range(600))
    assert set(cuts) == set(range(8, 25))
    assert max(cuts.values()) < 70
    assert SCHEDULE.half == 16
    late = replace(SCHEDULE, exact=20)
    assert {late.step(number).split for number in range(200)} == {21, 22, 23, 24}
    assert late.half == 21


def test_devices_share_a_step() -> None:
    for number in range(5):
        whole = SCHEDULE.step(number)
        shares = [SCHEDULE.step(number, rank, 2) for rank in range(2)]
        assert sorted(shares[0].rows + shares[1].rows) == sorted(whole.rows)
        assert {(share.number, share.split, len(share.rows)) for share in shares} == {(number, whole.split, 2)}


def test_batches_of_rows_in_order() -> None:
    assert batches(5, 2) == [[0, 1], [2, 3], [4]]


def test_too_few_rows_or_tokens() -> None:
    with pytest.raises(KvxferError, match=r"trainer.batch_size=8 is more than the 7 training rows"):
        replace(SCHEDULE, batch_size=8)
    with pytest.raises(KvxferError, match=r"corpus.length=5 leaves no prefix and continuation"):
        replace(SCHEDULE, length=5, exact=3)
    assert replace(SCHEDULE, length=6, exact=3).step(0).split == 4


def test_learning_rates() -> None:
    spec = TrainerSpec(max_steps=10, warmup_steps=4)
    rates = [learning_rate(spec, step) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.5)
    assert 0 < rates[9] < 0.1
    assert {learning_rate(replace(spec, schedule="constant"), step) for step in range(4, 10)} == {1.0}
    assert learning_rate(replace(spec, warmup_steps=0), 0) == 1.0
    assert learning_rate(replace(spec, warmup_steps=20), 9) == 0.5
