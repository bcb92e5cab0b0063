"""What transformers says in a warning while it loads: kept, because it may change a number, and told in one line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NO_NUMBER = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)


_LONGEST, _MOST = 300, 20


class Remarks(list[str]):
    """Lines, each once and not too long; of very many the first, and that there were more."""

    def add(self, text: str) -> None:
        line = " ".join(text.split())
        line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
        if line not in self and len(self) <= _MOST:
            self.append(line if len(self) < _MOST else "there were more warnings")


class _Collector(logging.Handler):
    def __init__(self, said: Remarks) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is said."""
        self.said.add(record.getMessage())


@contextmanager
def remarks(*libraries: str) -> Iterator[Remarks]:
    """Yield the list that the warnings of some libraries' loggers are put into, in place of stderr.

    Python's own warnings go there too, but for those about code that will change one day, which change no number.
    """
    said = Remarks()
    loggers = [logging.getLogger(name) for name in libraries]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    # What a library says once a process it says again: each result must tell it.
    if (forget := getattr(getattr(logging.Logger, "warning_once", None), "cache_clear", None)) is not None:
        forget()
    for logger in loggers:
        logger.handlers, logger.propagate = [_Collector(said)], False
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger, logger.handlers, level, logger.propagate in before:
            logger.setLevel(level)
    for each in found:
        if issubclass(each.category, _NO_NUMBER):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        else:
            said.add(str(each.message))
