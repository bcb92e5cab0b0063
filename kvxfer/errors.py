"""The one exception that users see."""

from __future__ import annotations


class KvxferError(ValueError):
    """Something that the person at the keyboard can mend: what is wrong, where it is set, what to do, in one line."""


class NotApplicable(KvxferError):
    """An evaluation that this pair, text or installation cannot have: a report of many leaves it out and says why."""
