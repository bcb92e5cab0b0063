"""Which commit of a model on the Hugging Face hub a branch, a tag or a shortened commit stands for."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.models.digests import digests

COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORTENED = re.compile(r"[0-9a-f]{7,39}")


def commit(model: str, revision: str, key: str) -> str:
    """The commit of 40 digits that ``revision`` stands for now; of a hub out of reach, what its cache here last knew.

    A process asks once, so that all its loads are of one commit. ``key`` names the side of the pair in errors.

    Raises:
        KvxferError: neither the hub nor its cache knows the model at this revision.
    """
    if COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import constants

    try:
        return _asked(model, revision, constants.HF_HUB_CACHE)
    except Exception as error:  # the hub's client raises errors of its own, of httpx and of the file system
        raise unreadable(model, revision, key, "config", error) from error


@functools.cache
def _asked(model: str, revision: str, cache: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision, cache_dir=cache)).parent.name
    except OSError:
        # The cache keeps no name for a shortened commit that it was not asked for.
        there = _snapshots(model, cache).glob(f"{revision}*") if _SHORTENED.fullmatch(revision) else ()
        meant = [folder.name for folder in there if COMMIT.fullmatch(folder.name)]
        if len(meant) != 1:
            raise
        return meant[0]


def verify(model: str, at: str, key: str) -> None:
    """Read all files of a commit in the hub's cache again: each is named by a hash of what it should hold.

    Raises:
        KvxferError: a file holds something else; it is named.
    """
    from huggingface_hub import constants

    snapshot = _snapshots(model, constants.HF_HUB_CACHE) / at
    blobs = {path: path.resolve() for path in sorted(snapshot.rglob("*")) if path.is_symlink() and path.is_file()}
    weights = digests([blob for blob in blobs.values() if len(blob.name) == 64], verify=True)
    for path, blob in blobs.items():
        found = weights.get(blob)
        if found is None and COMMIT.fullmatch(blob.name):  # small files have the name that git gives them
            content = blob.read_bytes()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if found not in (None, blob.name):
            raise KvxferError(
                f"{key}.model: {path} is not what was downloaded; delete it and {blob}, and download it again"
            )


def _snapshots(model: str, cache: str) -> Path:
    """Where the hub's cache keeps a model's commits."""
    from huggingface_hub.file_download import repo_folder_name

    return Path(cache) / repo_folder_name(repo_id=model, repo_type="model") / "snapshots"


def unreadable(model: str, revision: str, key: str, what: str, error: Exception) -> KvxferError:
    """The one line about a part of a hub's model that can't be had."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        todo = f"HF_HUB_OFFLINE is set: unset it to download revision {revision!r}, or set {key}.model to a folder"
    else:
        todo = f"check the id, {key}.revision ({revision!r}), the network and the licence, or give a local folder"
    return KvxferError(f"{key}.model: {what} of {model!r} can't be read ({first_line(error)}); {todo}")


def first_line(error: BaseException) -> str:
    """What an error of a library says first, in short; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]
