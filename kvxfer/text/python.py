"""Documents that every Python installation holds: sections of its language reference, files of its library.

A document is known by its heading or file name, not by its content: what is the same section or file in another
version of Python, in other words, is then in the same split.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import KvxferError

KINDS = ("pydoc", "stdlib")
# The other corpus, and tables of characters.
_LEFT_OUT = ("pydoc_data", "encodings")
_TESTS = re.compile(r"(.*_)?tests?")
_HEADING = re.compile(r"^(\S.*)\n([=*~-])\2{2,}$", re.MULTILINE)


@functools.cache
def digest(kind: str) -> str:
    whole = hashlib.sha256()
    for key, text in documents(kind):
        whole.update(f"{key}\0{text}\0".encode())
    return whole.hexdigest()


@functools.cache
def documents(kind: str) -> tuple[tuple[str, str], ...]:
    """The documents of ``pydoc`` or ``stdlib`` as (key, text), in the order of their keys, each text once.

    Raises :class:`KvxferError` when this Python comes without them.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    for key, text in _sections() if kind == "pydoc" else _files():
        content = " ".join(text.split())
        if content and key not in found and content not in seen:
            seen.add(content)
            found[key] = text
    return tuple(sorted(found.items()))


def _sections() -> Iterator[tuple[str, str]]:
    """Sections of the topics, by heading, without the lines under it.

    Topics hold one another: "compound" has all of "for". By section what they share is one document.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise KvxferError(f"corpus.kind=pydoc: this Python has no pydoc_data.topics ({error}); use another") from error
    for _, text in sorted(topics.items()):
        starts = [match.start() for match in _HEADING.finditer(text)]
        for start, stop in zip([0, *starts], [*starts, len(text)], strict=True):
            section = _HEADING.sub(r"\1", text[start:stop]).strip()
            if section:
                yield f"pydoc/{section.splitlines()[0]}", section


def _files() -> Iterator[tuple[str, str]]:
    """Source files of the standard library, without tests, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    # Not root.rglob: what is installed beside the library can be a hundred times its size.
    tops = [path for path in sorted(root.glob("*")) if path.stem in sys.stdlib_module_names.difference(_LEFT_OUT)]
    found = [file for top in tops for file in (top.rglob("*.py") if top.is_dir() else [top]) if file.suffix == ".py"]
    names = [name for name in sorted(file.relative_to(root) for file in found) if not _is_test(name.parts)]
    if not names:
        raise KvxferError(f"corpus.kind=stdlib: {root} holds no source of the standard library; use another Python")
    for name in names:
        try:
            with tokenize.open(root / name) as file:  # by the file's own encoding
                yield f"stdlib/{name.as_posix()}", file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise KvxferError(f"{root / name}: can't be read ({error}); mend the Python installation") from error


def _is_test(parts: tuple[str, ...]) -> bool:
    return any(_TESTS.fullmatch(part) for part in parts[:-1])
