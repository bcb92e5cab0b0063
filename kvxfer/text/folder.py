"""Documents of a local folder: a .txt or .md file is one, a line of a .jsonl file is one; .gz is read through."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import KvxferError

SUFFIXES = (".txt", ".md", ".jsonl")


def list_files(path: str, glob: str) -> list[tuple[str, Path]]:
    """Readable files under ``path`` that match ``glob``, as (relative name, file), sorted by name, without hidden ones.

    ``path`` may also be one file. Raises :class:`KvxferError` if it does not exist or nothing matches.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise KvxferError(f"corpus.path={path}: no such folder or file; set corpus.path to a folder of text")
    if root.is_file():
        found = [(root.name, root)]
    else:
        try:
            found = [(file.relative_to(root).as_posix(), file) for file in root.glob(glob) if file.is_file()]
        except (ValueError, NotImplementedError) as error:
            raise KvxferError(f"corpus.glob={glob!r}: {error}; give a pattern relative to corpus.path") from error
    readable = [
        (name, file)
        for name, file in found
        if name.removesuffix(".gz").endswith(SUFFIXES) and not any(part.startswith(".") for part in name.split("/"))
    ]
    if not readable:
        raise KvxferError(
            f"corpus.path={path}: none of {len(found)} files that match corpus.glob={glob!r} is one of "
            f"{', '.join(SUFFIXES)} (or such a .gz); change corpus.path or corpus.glob"
        )
    return sorted(readable)


def digest(path: str, glob: str) -> str:
    """SHA-256 over the files' sorted relative names and contents: the same folder elsewhere has the same digest."""
    whole = hashlib.sha256()
    for name, file in list_files(path, glob):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{name}\0{content}\n".encode())
    return whole.hexdigest()


def documents(path: str, glob: str, column: str) -> Iterator[str]:
    """The texts of all documents, by file name and then by line.

    Raises :class:`KvxferError` naming the file (and the line) that cannot be read or has no ``column``.
    """
    for name, file in list_files(path, glob):
        content = _read(file)
        if name.removesuffix(".gz").endswith(".jsonl"):
            yield from _lines(file, content, column)
        else:
            yield content


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KvxferError(
            f"{file}: not UTF-8 text (byte {error.start}: {error.reason}); convert it, or leave it out with corpus.glob"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise KvxferError(f"{file}: cannot be read ({error}); mend it, or leave it out with corpus.glob") from error


def _lines(file: Path, content: str, column: str) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold U+2028 and other separators that it would cut at.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise KvxferError(f"{file}, line {number}: not JSON ({error.msg}); mend the line") from error
        text = record.get(column) if isinstance(record, dict) else None
        if not isinstance(text, str):
            held = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise KvxferError(
                f"{file}, line {number}: no text in column {column!r} (the line holds {held}); set corpus.column"
            )
        yield text
