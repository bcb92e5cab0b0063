"""What a map must have shown, and what a handoff may take, before anything of it reaches a user."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvxfer.errors import KvxferError, files_of
from kvxfer.maps.evidence import METRICS

MEASURED = "measured"


@dataclass(frozen=True)
class Policy:
    """The fields are the keys of a policy file (YAML).

    Attributes:
        task, domain: options of ``eval`` and ``corpus`` that the evidence must be of; None for any.
        metric: of the mapped cache (``kvxfer.maps.evidence.METRICS``).
        at_least: what the lower end of the metric's 95 % interval must reach.
        items: fewest that must have been asked.
        beats: whether the verdict must say that the source and everything that costs no map are beaten.
        min_tokens: fewest tokens of a prompt: a number (0: any length), or ``measured``: from where on a handoff was
            measured to pay on this device (``eval=latency``).
        deadline_ms: most milliseconds from the handoff's beginning to the end of the map; None for no limit.
        norms: how many times as long or short as in calibration a layer's mapped keys or values may be, by the root of
            their mean squared length.
        shadow: share of requests, chosen by their id, that the target reads by itself as well; these answers are its
            own, and agreement and KL are recorded.
        failures: so many failed handoffs in a row open the breaker.
        retry_after: seconds after which an open breaker lets one handoff try.
    """

    task: str | None = None
    domain: str | None = None
    metric: str = "gap_recovered_nats"
    at_least: float = 0.5
    items: int = 100
    beats: bool = True
    min_tokens: int | str = MEASURED
    deadline_ms: float | None = None
    norms: float = 2.0
    shadow: float = 0.0
    failures: int = 5
    retry_after: float = 30.0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise KvxferError(f"policy.metric={self.metric} is none of {', '.join(METRICS)}")
        whole = isinstance(self.min_tokens, int) and not isinstance(self.min_tokens, bool) and self.min_tokens >= 0
        if self.min_tokens != MEASURED and not whole:
            raise KvxferError(
                f"policy.min_tokens={self.min_tokens} must be a number of tokens, 0 or more, or {MEASURED}"
            )
        for name, least in (("items", 0), ("norms", 1), ("failures", 1), ("retry_after", 0)):
            if not getattr(self, name) >= least:
                raise KvxferError(f"policy.{name}={getattr(self, name)} must be {least} or more")
        if not 0 <= self.shadow <= 1:
            raise KvxferError(f"policy.shadow={self.shadow} must be a share between 0 and 1")
        if self.deadline_ms is not None and not self.deadline_ms > 0:
            raise KvxferError(f"policy.deadline_ms={self.deadline_ms} must be above 0, or null for no limit")

    @staticmethod
    def read(path: Path) -> Policy:
        """A policy file.

        Raises:
            KvxferError: it can't be read, has a key that there is not, or a value of the wrong kind.
        """
        with files_of("policy", path):
            text = path.read_text(encoding="utf-8")
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise KvxferError(f"policy: {path} is no YAML ({str(error).splitlines()[0]})") from error
        return Policy.of({} if data is None else data, str(path))

    @staticmethod
    def of(data: Any, where: str = "policy") -> Policy:
        """A policy from plain values."""
        if not isinstance(data, dict):
            raise KvxferError(f"{where}: a policy has keys ({', '.join(_KEYS)}), and this is {type(data).__name__}")
        if unknown := sorted(map(str, set(data) - set(_KEYS))):
            raise KvxferError(f"{where}: policy has no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
        for key, value in data.items():
            kinds = _KEYS[key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise KvxferError(f"{where}: policy.{key}={value!r} is not {' or '.join(map(_said, kinds))}")
        known: dict[str, Any] = {key: _number(key, value) for key, value in data.items()}
        return Policy(**known)


_NUMBER = (int, float)
_KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("task", "domain"), (str, type(None))),
    **{"metric": (str,), "at_least": _NUMBER, "items": (int,), "beats": (bool,), "min_tokens": (int, str)},
    **{"deadline_ms": (*_NUMBER, type(None)), "norms": _NUMBER, "shadow": _NUMBER, "failures": (int,)},
    "retry_after": _NUMBER,
}
assert set(_KEYS) == {field.name for field in fields(Policy)}


def _number(key: str, value: Any) -> Any:
    """A whole number as what the key's field is, where that is a float."""
    return float(value) if float in _KEYS[key] and value is not None else value


def _said(kind: type) -> str:
    return {"NoneType": "null", "str": "text", "int": "a whole number", "float": "a number"}.get(
        kind.__name__, "true or false"
    )
