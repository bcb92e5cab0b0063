"""The closed forms by name; ``auto`` chooses between them."""

from __future__ import annotations

from kvxfer.fitting.closed.closed_form import ClosedForm
from kvxfer.fitting.closed.head_local import HeadLocal
from kvxfer.fitting.closed.ridge import Ridge
from kvxfer.fitting.closed.weighted import Weighted

CLOSED_FORMS: dict[str, type[ClosedForm]] = {"ridge": Ridge, "head_local": HeadLocal, "weighted": Weighted}
