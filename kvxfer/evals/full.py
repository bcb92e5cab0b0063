"""``eval=full``: every kind of evaluation of one map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvxfer.errors import KvxferError


@dataclass(frozen=True)
class FullSpec:
    """``parts`` are options of group ``eval``, in the order of the report."""

    kind: ClassVar[str] = "full"

    name: str
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise KvxferError("eval.parts=[] names nothing to evaluate: name options of eval, e.g. [standard]")
        twice = sorted({part for part in self.parts if self.parts.count(part) > 1})
        if twice:
            raise KvxferError(f"eval.parts names {', '.join(twice)} twice")

    def identity(self) -> dict[str, Any]:
        """What is put together; the numbers are decided by the parts."""
        return {"kind": self.kind, "parts": list(self.parts)}
