"""How close a written answer is to an expected one, as SQuAD defines it (Rajpurkar et al., arXiv 1606.05250).

The harness's CoQA takes these two measures from a module that newer releases of transformers do not have; ``offered``
puts them in its place while tasks are loaded.
"""

from __future__ import annotations

import importlib.util
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_PACKAGE = "transformers.data.metrics"
_MODULE = f"{_PACKAGE}.squad_metrics"


def _tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def compute_exact(expected: str, answer: str) -> int:
    """1 if the two are the same words."""
    return int(_tokens(expected) == _tokens(answer))


def compute_f1(expected: str, answer: str) -> float:
    """The harmonic mean of the shares of words that the two have in common; an empty one equals only an empty one."""
    ours, theirs = Counter(_tokens(expected)), Counter(_tokens(answer))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


@contextmanager
def offered() -> Iterator[None]:
    """Let an import of the module that is gone find these measures; where it still exists it is left alone."""
    try:
        there = importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        there = False
    if there:
        yield
        return
    package, module = ModuleType(_PACKAGE), ModuleType(_MODULE)
    vars(module).update(compute_exact=compute_exact, compute_f1=compute_f1)
    vars(package).update(squad_metrics=module)
    before = {name: sys.modules.get(name) for name in (_PACKAGE, _MODULE)}
    sys.modules |= {_PACKAGE: package, _MODULE: module}
    try:
        yield
    finally:
        for name, known in before.items():
            if known is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = known
