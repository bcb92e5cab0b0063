"""SHA-256 of large files, read once: what was read is kept under what the file system says of the file.

A file has the same digest as long as device, inode, size and both of its times (to the nanosecond) are the same. A
change of its content moves the second one, which no program can set back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvxfer.files import write_text

log = logging.getLogger("kvxfer")

BAR_BYTES = 2**30
"""From so many bytes on that are to be read, a bar shows how far it is."""
_CHUNK = 2**22
_CLOCK_NS, _WHOLE_SECONDS_NS = 20_000_000, 2_000_000_000
_read_again: set[str] = set()


def cache_home() -> Path:
    """Where what was unpacked or read once is kept: ``$KVXFER_CACHE``, else ``~/.cache/kvxfer``."""
    return Path(os.environ.get("KVXFER_CACHE") or Path.home() / ".cache" / "kvxfer")


def digests(files: Iterable[Path], verify: bool = False) -> dict[Path, str]:
    """The SHA-256 of every file's content, from the cache where the file is as it was when it was read.

    Args:
        verify: read all of them again, once a process; what is no longer as it was read is told.

    Raises:
        OSError: a file can't be read.
    """
    keys = {path: _key(path.stat()) for path in files}
    kept = {path: _recall(key) for path, key in keys.items()}
    wanted = [path for path in keys if kept[path] is None or (verify and keys[path] not in _read_again)]
    size = sum(path.stat().st_size for path in wanted)
    if size < BAR_BYTES:
        found = {path: _read(path, lambda count: None) for path in wanted}
    else:
        from kvxfer.progress import progress

        with progress("read weights, once", size >> 20, "MB") as advance:
            found = {path: _read(path, advance) for path in wanted}
    for path, (key, digest) in found.items():
        if kept[path] not in (None, digest):
            log.warning("%s is not what was read before, though its size and times are: it counts as another", path)
        _read_again.add(key)
    return {path: found[path][1] if path in found else str(kept[path]) for path in keys}


def _key(status: os.stat_result) -> str:
    return "-".join(
        str(part) for part in (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    )


def _read(path: Path, advance: Callable[[int], None]) -> tuple[str, str]:
    """A file's key and digest, which is kept if nobody wrote to the file meanwhile."""
    before = path.stat()
    _wait_past(before.st_ctime_ns)
    digest, read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance((read + len(chunk) >> 20) - (read >> 20))
            read += len(chunk)
    key = _key(before)
    if key == _key(path.stat()):
        _keep(key, digest.hexdigest())
    return key, digest.hexdigest()


def _wait_past(changed: int) -> None:
    """Wait until a later change would have a later time: clocks of file systems tick slowly, some every two seconds."""
    tick = _CLOCK_NS if changed % 1_000_000_000 else _WHOLE_SECONDS_NS
    left = changed + tick - time.time_ns()
    if 0 < left <= tick:
        time.sleep(left / 1e9)


def _entry(key: str) -> Path:
    return cache_home() / "digests" / key


def _recall(key: str) -> str | None:
    """The digest that is kept; None where there is none, or the entry is damaged."""
    try:
        digest, _, check = _entry(key).read_text(encoding="ascii").partition(" ")
    except (OSError, ValueError):
        return None
    return digest if check == _check(key, digest) else None


def _keep(key: str, digest: str) -> None:
    """A cache that can't be written costs time, and nothing else."""
    entry = _entry(key)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_text(entry, f"{digest} {_check(key, digest)}")
    except OSError as error:
        if _recall(key) != digest:  # else another process was faster
            log.warning("%s can't be written (%s): its file is read again; set KVXFER_CACHE", entry, error.strerror)


def _check(key: str, digest: str) -> str:
    return hashlib.sha256(f"{key} {digest}".encode()).hexdigest()[:16]
