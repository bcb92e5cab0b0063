"""What was read of a corpus, and what was left out of it: nothing is without a word."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import dataclass, field

from kvxfer.errors import KvxferError

log = logging.getLogger("kvxfer")

EMPTY, UNREADABLE, FOLDER, UNDECODABLE = "empty", "unreadable files", "unreadable folders", "not UTF-8"
NOT_JSON, NO_TEXT = "lines that Python does not read as JSON", "lines without the column"
TWICE, OTHER, HIDDEN = "there twice", "files of other kinds", "hidden files and folders"
SEEN = "links to folders read already"
_MEANT = (TWICE, OTHER, HIDDEN, SEEN)
"""Of these nothing is lost: they are counted, but no reason to stop."""


@dataclass
class Reading:
    """Counts of documents that were read, and of what was left out by reason; ``first`` tells the first of each."""

    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def leave_out(self, reason: str, said: str) -> None:
        """Count something; ``said`` is where it is, what is wrong with it and what to do."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, said)

    @property
    def lost(self) -> int:
        """Documents that should have been read."""
        return sum(count for reason, count in self.left_out.items() if reason not in _MEANT)

    def check(self, name: str, most: float) -> None:
        """Say what was left out, once a process.

        Raises:
            KvxferError: it is more than a share ``most`` of all documents; it tells the first one.
        """
        if not self.lost:
            return
        everything = self.read + self.lost
        counts = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if reason not in _MEANT)
        first = next(said for reason, said in self.first.items() if reason not in _MEANT)
        left = f"{self.lost} of {everything} documents of {name} are left out ({counts})"
        if self.lost > most * everything:
            raise KvxferError(f"{first}; {left}, more than corpus.max_left_out={most:g}")
        _say_once(f"{left}; the first: {first}")


@functools.lru_cache(64)
def _say_once(line: str) -> None:
    log.warning(line)
