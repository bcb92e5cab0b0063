"""Documents of a local folder: a .txt or .md file is one, a line of a .jsonl file is one; .gz is read through."""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import KvxferError, file_error, files_of
from kvxfer.files import file_sha256
from kvxfer.text.reading import FOLDER, HIDDEN, NO_TEXT, NOT_JSON, OTHER, SEEN, UNDECODABLE, UNREADABLE, Reading

SUFFIXES = (".txt", ".md", ".jsonl")


def list_files(path: str, glob: str, reading: Reading | None = None) -> list[tuple[str, Path]]:
    """Text files under ``path`` that match ``glob``, as (relative name, file), sorted by name, without hidden ones.

    Links are followed, and each folder is read once, under the name that no link is a part of if it has one. ``path``
    may also be one file. ``reading`` is told what is left out. Raises :class:`KvxferError` if it does not exist or
    nothing matches.
    """
    root, reading = Path(path).expanduser(), Reading() if reading is None else reading
    with files_of("corpus.path", root):
        if not root.exists():
            raise KvxferError(f"corpus.path={path}: no such folder or file; set corpus.path to a folder of text")
        alone = root.is_file()
    names = [] if alone else _walk(root, _parts(glob), reading)
    found = [(root.name, root)] if alone else [(name, root / name) for name in names]
    texts = [(name, file) for name, file in found if name.removesuffix(".gz").endswith(SUFFIXES)]
    for name, _ in sorted(set(found) - set(texts)):
        reading.leave_out(OTHER, name)
    if not texts and reading.lost:
        reading.check(path, 0.0)
    if not texts:
        raise KvxferError(
            f"corpus.path={path}: none of {len(found)} files that match corpus.glob={glob!r} is one of "
            f"{', '.join(SUFFIXES)} (or such a .gz); change corpus.path or corpus.glob"
        )
    return sorted(texts)


def _walk(root: Path, parts: tuple[str, ...], reading: Reading) -> Iterator[str]:
    """Names of the files below a folder that match and are not hidden; what links lead to comes after all else."""
    seen: set[tuple[int, int]] = set()
    folders, links = [""], list[str]()
    while folders or links:
        name = folders.pop() if folders else links.pop(0)
        try:
            about = (root / name).stat()
            if (about.st_dev, about.st_ino) in seen:
                reading.leave_out(SEEN, name)
                continue
            seen.add((about.st_dev, about.st_ino))
            entries = sorted(os.scandir(root / name), key=lambda entry: entry.name)
        except OSError as error:
            reading.leave_out(FOLDER, f"{file_error(error)}, or leave it out with corpus.glob")
            continue
        for entry in entries:
            own = f"{name}/{entry.name}" if name else entry.name
            folder = entry.is_dir(follow_symlinks=False)
            linked = entry.is_symlink() and os.path.isdir(entry.path)
            if not _matches(parts, tuple(own.split("/")), folder or linked):
                continue
            if entry.name.startswith("."):
                reading.leave_out(HIDDEN, own)
            elif folder or linked:
                (folders if folder else links).append(own)
            elif os.path.isfile(entry.path) or not os.path.exists(entry.path):
                yield own
            else:
                reading.leave_out(OTHER, own)  # a pipe would be waited for


def _parts(glob: str) -> tuple[str, ...]:
    """The parts of a pattern as ``Path.glob`` takes it."""
    parts = tuple(part for part in glob.split("/") if part not in ("", "."))
    if not parts or glob.startswith("/") or ".." in parts:
        raise KvxferError(f"corpus.glob={glob!r}: no such pattern; give one relative to corpus.path, as **/*.txt")
    if any("**" in part and part != "**" for part in parts):
        raise KvxferError(f"corpus.glob={glob!r}: ** stands for folders, alone between slashes; write **/* for all")
    return (*parts, "*") if parts[-1] == "**" else parts


def _matches(parts: tuple[str, ...], names: tuple[str, ...], folder: bool) -> bool:
    """Whether a file's name, in parts, matches a pattern; of a folder's, whether one below it may."""
    if not parts or not names:
        return bool(parts) if folder else not parts and not names
    if parts[0] == "**":
        return folder or any(_matches(parts[1:], names[n:], False) for n in range(len(names)))
    return fnmatch.fnmatchcase(names[0], parts[0]) and _matches(parts[1:], names[1:], folder)


def digest(path: str, glob: str) -> str:
    """SHA-256 over the files' sorted relative names and contents: the same folder elsewhere has the same digest.

    What can't be read has no content, until it can.
    """
    whole = hashlib.sha256()
    for name, file in list_files(path, glob):
        try:
            content = file_sha256(file)
        except OSError:
            content = "unreadable"
        whole.update(f"{name}\0{content}\n".encode())
    return whole.hexdigest()


def documents(path: str, glob: str, column: str, reading: Reading) -> Iterator[str]:
    """The texts of all documents, by file name and then by line; what can't be read is left out, and counted."""
    for name, file in list_files(path, glob, reading):
        data = _read(file, reading)
        if data is None:
            continue
        if name.removesuffix(".gz").endswith(".jsonl"):
            yield from _lines(file, data, column, reading)
        elif (content := _decoded(file, data, reading)) is not None:
            yield content


def _read(file: Path, reading: Reading) -> bytes | None:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).removeprefix(codecs.BOM_UTF8)
    except (OSError, EOFError, zlib.error) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        reading.leave_out(UNREADABLE, f"{file}: cannot be read ({said}); mend it, or leave it out with corpus.glob")
    return None


def _decoded(where: Path | str, data: bytes, reading: Reading) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 text (byte {error.start}: {error.reason})"
        reading.leave_out(UNDECODABLE, f"{where}: {wrong}; convert it, or leave it out with corpus.glob")
    return None


def _lines(file: Path, data: bytes, column: str, reading: Reading) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold U+2028 and other separators that it would cut at.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        where = f"{file}, line {number}"
        line = _decoded(where, raw, reading) if raw.strip() else None
        if line is None:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else f"that Python reads: {error}"
            reading.leave_out(NOT_JSON, f"{where}: not JSON ({said}); mend the line")
            continue
        text = record.get(column) if isinstance(record, dict) else None
        if isinstance(text, str):
            yield text
            continue
        held = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        reading.leave_out(NO_TEXT, f"{where}: no text in column {column!r} (the line holds {held}); set corpus.column")
