"""What became of a handoff: an object, a JSON line, and counters."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, file_error, files_of

log = logging.getLogger("kvxfer")

APPLIED, FALLBACK, UNSUPPORTED = "applied", "fallback", "unsupported"
STATUSES = (APPLIED, FALLBACK, UNSUPPORTED)


@dataclass(frozen=True)
class HandoffRecord:
    """One request.

    Attributes:
        request: its id.
        status: ``applied``; ``fallback``: the target read the prompt itself; ``unsupported``: so it did, and this map
            can't ever serve this pair.
        reason: one word, of all but ``applied``; ``why`` is a sentence.
        mapped, exact: tokens of the prompt that were mapped, and that the target read itself before its first token.
        milliseconds: by part: ``export``, ``exact``, ``map``, ``check``, ``inject``, ``prefill`` (the target's own).
        bytes: of the target's cache that was handed over.
        flops_share: of the handoff, against the target's own prefill; 1 where that was done.
        map: the map's hash; None where it can't be read.
        shadow: of requests that the target read as well: ``agrees`` (the likeliest next token) and ``kl`` (nats).
    """

    request: str
    status: str
    reason: str | None
    why: str | None
    mapped: int
    exact: int
    milliseconds: dict[str, float]
    bytes: int
    flops_share: float
    map: str | None
    shadow: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)


class Accounts:
    """Where records go: lines of a file, and counters of ``prometheus_client``, if asked for.

    Args:
        log: a file that is appended to.
        metrics: a ``CollectorRegistry`` that the counters are added to; it can hold those of one handoff.
    """

    def __init__(self, log: Path | None = None, metrics: Any = None) -> None:
        self.log, self._lock = log, threading.Lock()
        self._counters = None if metrics is None else _Counters(metrics)

    def keep(self, record: HandoffRecord) -> None:
        """Count a record, and write it. A log that can't be written any more is a warning: the request goes on."""
        if self._counters is not None:
            self._counters.count(record)
        if self.log is not None:
            try:
                with self._lock, self.log.open("a", encoding="utf-8") as file:
                    file.write(record.line() + "\n")
            except OSError as error:
                log.warning("a handoff's record is lost: %s", file_error(error))

    def check(self) -> None:
        """Refuse a log that can't be written, before a request needs it."""
        if self.log is not None:
            with files_of("log", self.log), self.log.open("a", encoding="utf-8"):
                pass


class _Counters:
    """Requests by status and reason, tokens mapped and exact, and seconds by part."""

    def __init__(self, registry: Any) -> None:
        try:
            from prometheus_client import Counter
        except ImportError as error:
            raise KvxferError("metrics need prometheus_client: pip install 'kvxfer[metrics]'") from error
        make = {"registry": registry}
        self.requests = Counter("kvxfer_handoffs", "Handoffs by status and reason", ["status", "reason"], **make)
        self.tokens = Counter("kvxfer_tokens", "Tokens of prompts, mapped or exact", ["kind"], **make)
        self.seconds = Counter("kvxfer_seconds", "Seconds of handoffs by part", ["part"], **make)

    def count(self, record: HandoffRecord) -> None:
        self.requests.labels(record.status, record.reason or "").inc()
        self.tokens.labels("mapped").inc(record.mapped)
        self.tokens.labels("exact").inc(record.exact)
        for part, milliseconds in record.milliseconds.items():
            self.seconds.labels(part).inc(milliseconds / 1000)
