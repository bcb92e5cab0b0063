"""A breaker: after several failures in a row nothing is tried for a while, then once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Closed (everything passes), open (nothing does), or half open (one trial is on its way); safe to share.

    Args:
        failures: so many in a row open it.
        retry_after: seconds after which an open one lets a single trial pass: its success closes, its failure opens.
        clock: seconds that only grow.
    """

    def __init__(self, failures: int, retry_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures, self._retry_after, self._clock = failures, retry_after, clock
        self._lock = threading.Lock()
        self._in_a_row, self._trying = 0, False
        self._opened: float | None = None

    @property
    def open(self) -> bool:
        """Whether the next request would be turned away or be the trial."""
        with self._lock:
            return self._opened is not None

    def passes(self) -> bool:
        """Whether a request may be tried now. What may must say afterwards how it went (``succeeded``, ``failed``)."""
        with self._lock:
            if self._opened is None:
                return True
            if self._trying or self._clock() - self._opened < self._retry_after:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """What was tried went well."""
        with self._lock:
            self._in_a_row, self._opened, self._trying = 0, None, False

    def left(self) -> None:
        """What was to be tried was not, and says nothing."""
        with self._lock:
            self._trying = False

    def failed(self) -> None:
        """What was tried failed."""
        with self._lock:
            self._in_a_row += 1
            if self._trying or self._in_a_row >= self._failures:
                self._opened, self._trying = self._clock(), False
