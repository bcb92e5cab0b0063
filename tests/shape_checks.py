"""Shape checks that cost little where there is no shape. Imported before anything of this package."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jaxtyping

# What a module that the import hook instruments imports in its turn is compiled anew in every process: 1,000 files.
import lightning  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import requests  # noqa: F401
import scipy.stats  # noqa: F401
import torchmetrics  # noqa: F401
import transformers.models.qwen3  # noqa: F401
from beartype import beartype

with_shapes = jaxtyping.jaxtyped


def checked(function: Any = None, *, typechecker: Any) -> Any:
    """``jaxtyping.jaxtyped``, save for functions without a shape in their hints.

    Remembering the dimensions of a call costs far more than a check of plain types, which is all that such a function
    needs; and one that is made anew by every call of another is left to mypy.
    """
    if function is None:
        return functools.partial(checked, typechecker=typechecker)
    if not inspect.isfunction(function) or _has_shape(function):
        return with_shapes(function, typechecker=typechecker)
    return function if "<locals>" in function.__qualname__ else beartype(function)


def _has_shape(function: Any) -> bool:
    try:
        hints = [eval(hint, function.__globals__) for hint in function.__annotations__.values()]
    except Exception:  # a name that only type checkers import
        return True
    return "jaxtyping" in repr(hints)


jaxtyping.jaxtyped = checked  # type: ignore[assignment]  # which the hook of ``--jaxtyping-packages`` puts around all
