"""The exceptions that users see, and what the file system says, put so that they can act on it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class KvxferError(ValueError):
    """Something that the person at the keyboard can mend: what is wrong, where it is set, what to do, in one line."""


class NotApplicable(KvxferError):
    """An evaluation that this pair, text or installation cannot have: a report of many leaves it out and says why."""


_AGAIN = "then give the same command again: it goes on from what is finished"
_ELSEWHERE = "give another path, or its permissions to this user"
_NO_LOCKS = "has no file locks, which keep two jobs from writing one run", "put it on another disk"
_TOLD = {
    errno.ENOSPC: ("no space left on this disk", f"make room, {_AGAIN}"),
    errno.EDQUOT: ("the quota of this disk is used up", f"make room, {_AGAIN}"),
    errno.EFBIG: ("larger than a file may be here (ulimit -f)", f"raise the limit, {_AGAIN}"),
    errno.EROFS: ("this disk can only be read", "give another path"),
    errno.EACCES: ("permission denied", _ELSEWHERE),
    errno.EPERM: ("not permitted", _ELSEWHERE),
    errno.ENOENT: ("no such file or folder", "give a path that exists"),
    errno.ELOOP: ("its links lead in a circle", "give another path, or mend the links"),
    errno.EISDIR: ("a folder, where a file belongs", "move it away, or give another path"),
    errno.ENOTDIR: ("a part of this path is a file, not a folder", "give another path"),
    errno.EEXIST: ("it is in the way", "move it away, or give another path"),
    errno.ENOTEMPTY: ("it is in the way", "move it away, or give another path"),
    errno.ENAMETOOLONG: ("too long a name for this disk", "give a shorter path"),
    errno.EMFILE: ("too many open files (ulimit -n)", f"raise the limit, {_AGAIN}"),
    errno.ENFILE: ("too many open files on this machine", f"close some, {_AGAIN}"),
    errno.ENOLCK: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
}
"""What is wrong and what to do; of any other number its usual name is told."""
_SOME_DISK_ERROR = f"see that the disk is well, {_AGAIN}"
_FULL_OR_BROKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What a library may say of a file that it does not name, but that was certainly being written."""
_NUMBERED = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
_NAMED = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)}
_MAPPED = re.compile(r"file <([^>]+)>.*\((\d+)\)")
"""How torch tells of a file that it can't open or map: the path and the number."""
# Torch's writer is C++ and forgets what the disk said.
_TORCH = ("PytorchStreamWriter", "inline_container", "unexpected pos ")


@dataclass(frozen=True)
class _Said:
    """What the file system said: the number, the path and the words, as far as they are known."""

    number: int | None
    path: str | None
    words: str
    network: bool = False

    @property
    def of_a_written_file(self) -> bool:
        named = any(word in self.words for word in (*_TORCH, "(os error "))
        return not self.network and (named or self.number in _FULL_OR_BROKEN)


def file_error(error: BaseException, place: Path | None = None) -> KvxferError | None:
    """What the file system said, as one of our errors: the path, what is wrong and what to do. None of any other error.

    Libraries that are not written in Python (safetensors, tokenizers, torch) tell it in words of their own.

    Args:
        place: what was written or read, where the error itself does not say.
    """
    said = _said(error)
    if said is None:
        return None
    if said.network or (said.number is None and said.path is None and not said.of_a_written_file):
        return KvxferError(said.words)
    path = said.path or (None if place is None else str(place))
    number = said.number or 0
    wrong, advice = _TOLD.get(number, (os.strerror(number) if number else said.words, _SOME_DISK_ERROR))
    if number == errno.ENOENT and path is not None and os.path.islink(path):
        wrong, advice = f"a link to {os.readlink(path)}, which is not there", "mend or remove the link"
    return KvxferError(f"{path or 'a file that was written or read'}: {wrong}; {advice}")


@contextmanager
def files_of(key: str, place: Path) -> Iterator[None]:
    """What the file system says about a place, or about no path at all, is told with the setting that it comes from."""
    try:
        yield
    except KvxferError:
        raise
    except Exception as error:
        said = _said(error)
        if said is None or not (said.of_a_written_file if said.path is None else _within(said.path, place)):
            raise
        raise KvxferError(f"{key}: {file_error(error, place)}") from error


def _said(error: BaseException) -> _Said | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KvxferError):
        words = next((line.strip() for line in str(seen).splitlines() if line.strip()), type(seen).__name__)
        if isinstance(seen, OSError):
            path = seen.filename if isinstance(seen.filename, str | bytes | os.PathLike) else None
            number = _number_in(str(seen)) if seen.errno is None else seen.errno
            network = isinstance(seen, ConnectionError | TimeoutError)
            return _Said(number, None if path is None else os.fsdecode(path), words, network)
        if (mapped := _MAPPED.search(words)) is not None:
            return _Said(int(mapped[2]), mapped[1], words)
        if (number := _number_in(str(seen))) is not None:
            return _Said(number, None, words)
        if any(word in str(seen) for word in _TORCH):
            below = seen.__cause__ or seen.__context__
            return (below and _said(below)) or _Said(None, None, words)
        seen = seen.__cause__
    return None


def _number_in(text: str) -> int | None:
    if (match := _NUMBERED.search(text)) is not None:
        return int(match[1] or match[2])
    return next((number for name, number in _NAMED.items() if name in text), None)


def _within(path: str, place: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(place))
