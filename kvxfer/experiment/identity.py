"""What of a spec decides a run's id: said by its fields (``kvxfer.text.spec`` has the words), read here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any


def identity(spec: Any, unread: Iterable[str] = ()) -> dict[str, Any]:
    """All that decides, as plain JSON types.

    Args:
        spec: a frozen dataclass, in which others may lie.
        unread: fields that this run does not read, those of a spec within it as ``rows.evaluation``.
    """
    unread, found = tuple(unread), {}
    for item in fields(spec):
        decides = item.metadata.get("id", True)
        if decides is False or item.name in unread:
            continue
        value = decides(spec) if callable(decides) else getattr(spec, item.name)
        prefix = f"{item.name}."
        below = tuple(name.removeprefix(prefix) for name in unread if name.startswith(prefix))
        found[item.name] = _plain(value, below)
    return found


def _plain(value: Any, unread: tuple[str, ...] = ()) -> Any:
    if is_dataclass(value):
        return identity(value, unread)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
