"""Single items of an evaluation's results, in the one form that two runs are tested against each other in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def scored_lists(data: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Every list of ``items`` with the nats of a mapped cache, by where it is in the results.

    A list's name is made of the plain values beside it, as ``domain toy, prefix 48``.
    """
    return dict(_lists(data, ()))


def paired_item(
    item: Mapping[str, Any],
    nats: float | None = None,
    correct: bool | None = None,
    score: float | None = None,
    tokens: int = 1,
) -> Mapping[str, Any]:
    """One item under its mapped cache.

    Args:
        nats: less is better; of all its ``tokens``.
        correct: right or wrong.
        score: where an answer is more or less right: more is better.
    """
    found: dict[str, Any] = {"id": item["id"], "document": item["document"], "tokens": tokens}
    given = {"nats": nats, "correct": correct, "score": score}
    return found | {key: {"mapped": value} for key, value in given.items() if value is not None}


def _lists(value: Any, said: tuple[str, ...]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    if isinstance(value, list):
        for item in value:
            yield from _lists(item, said)
    elif isinstance(value, Mapping):
        plain = [f"{key} {item}" for key, item in value.items() if isinstance(item, str | int)]
        items = value.get("items")
        if _are_scored(items):
            yield ", ".join((*said, *plain)), list(items or [])
        for key, item in value.items():
            if key != "items":
                yield from _lists(item, said)


def _are_scored(items: Any) -> bool:
    if not isinstance(items, list) or not items or not isinstance(items[0], Mapping):
        return False
    needed = {"id", "document", "tokens", "nats"}
    return all(needed <= set(item) and "mapped" in item["nats"] for item in items)
