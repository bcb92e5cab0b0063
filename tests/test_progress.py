"""Progress lines where there is no terminal."""

from __future__ import annotations

import logging

import pytest

from kvxfer.progress import progress


def test_the_last_line_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    """A training may end before its last step, and may have begun after its first."""
    caplog.set_level(logging.INFO)
    with progress("train", 1000, "steps", done=100) as advance:
        for _ in range(50):
            advance(1)
    assert caplog.messages[-1].startswith("train: done, 50 steps in ")
