"""Which tokens of a prefix are exact (computed by the target) and which are mapped."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvxfer.errors import KvxferError

MAP_DTYPES = ("auto", "bfloat16", "float32", "float64")
"""In which the products of a map may run; ``auto`` is bfloat16 for caches in it where that is fast, else float32."""


@dataclass(frozen=True)
class Plan:
    """The first tokens and the last ones are the target's own; what lies between is mapped.

    Args:
        name: the option's name.
        exact_first: leading tokens that the target computes itself (attention sinks live there).
        hold_back: last prompt tokens that the target computes itself (at least one: it yields the first logits).
    """

    name: str = "sinks"
    exact_first: int = 4
    hold_back: int = 1

    def __post_init__(self) -> None:
        if self.exact_first < 0:
            raise KvxferError(f"plan.exact_first={self.exact_first} must be 0 or more tokens")
        if self.hold_back < 1:
            raise KvxferError(f"plan.hold_back={self.hold_back} must be 1 or more: the last token yields the logits")

    def mapped_span(self, prompt: int) -> tuple[int, int]:
        """The mapped tokens of a prompt, from (inclusive) and to (exclusive)."""
        stop = prompt - self.hold_back
        if stop < 1:
            raise KvxferError(
                f"plan.hold_back={self.hold_back} leaves nothing of a prompt of {prompt} tokens to hand over"
            )
        return min(self.exact_first, stop), stop

    def require_seen(self, skip_first: int) -> None:
        """Refuse to map first tokens that a map has never seen, which are outliers where attention parks on them.

        Args:
            skip_first: how many first tokens of a row the map's moments and training left out.
        """
        if self.exact_first < skip_first:
            raise KvxferError(
                f"plan.exact_first={self.exact_first} (plan={self.name}) maps first tokens that the map never saw: "
                f"it was calibrated with corpus.skip_first={skip_first}; set plan.exact_first={skip_first} or more, or "
                f"calibrate and train a map that has seen them with corpus.skip_first={self.exact_first}"
            )

    def holding_back(self, tokens: int) -> Plan:
        return replace(self, hold_back=tokens)
