"""What scripts ask of this package about where a result comes from."""

from __future__ import annotations

from kvxfer.experiment.runs import environment

__all__ = ["environment"]
