"""A checkpoint holds all parameters of its model and no others, or it is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvxfer.errors import KvxferError

_SHOWN = 3


def refuse_incomplete(info: Mapping[str, Any], name: str) -> None:
    """Refuse what the library would fill with random numbers, leave out, or make anew.

    Args:
        info: ``output_loading_info`` of ``from_pretrained``. What a model class knows to be of no use, and weights that
            are tied to others, it does not list.
        name: whose it is, for the error.

    Raises:
        KvxferError: parameters are missing, are not the model's, or have another shape; it names the first of them.
    """
    shapes = [
        f"{key} ({_shape(there)} in place of {_shape(wanted)})"
        for key, there, wanted in sorted(info["mismatched_keys"])
    ]
    found = {
        "lack": sorted(info["missing_keys"]),
        "have in another shape": shapes,
        "hold, though the model has no such parameter,": sorted(info["unexpected_keys"]),
    }
    said = [f"{what} {_listed(keys)}" for what, keys in found.items() if keys]
    if said:
        raise KvxferError(
            f"{name}: its weights {'; they '.join(said)}. Numbers would depend on chance: get the whole checkpoint "
            "with the config that belongs to it (to leave out layers, set drop_layers)"
        )


def _shape(sizes: Iterable[int]) -> str:
    return " × ".join(map(str, sizes))


def _listed(keys: list[str]) -> str:
    more = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
