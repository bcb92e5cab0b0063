"""The commits that names on a model hub stand for in one folder of results: those that they stood for first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvxfer.errors import KvxferError
from kvxfer.files import write_text
from kvxfer.models import hub
from kvxfer.models.hub import COMMIT
from kvxfer.models.spec import ModelSpec, PairSpec, content_digest

REVISIONS = "revisions"
"""The folder beside the stages' that holds one small file for every name."""


def pinned(pair: PairSpec, outputs: Path) -> PairSpec:
    """The pair with commits in place of the branches and tags that its models are named by.

    A commit that was recorded before does where neither hub nor cache can tell one.

    Raises:
        KvxferError: a name has come to stand for another commit, or for none that is known.
    """
    if pair.random_weights:
        return pair
    source, target = (_pinned(getattr(pair, side), f"pair.{side}", outputs) for side in ("source", "target"))
    return replace(pair, source=source, target=target)


def verify(pair: PairSpec) -> None:
    """Read every file of a pinned pair again, whatever was read before.

    Raises:
        KvxferError: a file of the hub's cache is not what was downloaded.
    """
    if not pair.random_weights:
        for model, key in zip(pair.oriented(), pair.config_keys, strict=True):
            if content_digest(model, key, verify=True) is None:
                hub.verify(model.model, model.revision, key)


def refuse_changed(asked: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Refuse models whose files are no longer those that the run is named by.

    Args:
        asked: the pair's identity.
        loaded: how the pair that was loaded describes itself.
    """
    for side in ("source", "target"):
        if asked[side].get("sha256") != loaded[side].get("sha256"):
            raise KvxferError(f"pair.{side}: its files changed since this command began; give the command again")


def _pinned(spec: ModelSpec, key: str, outputs: Path) -> ModelSpec:
    if not spec.on_hub or COMMIT.fullmatch(spec.revision):
        return spec
    file = outputs / REVISIONS / quote(f"{spec.model}@{spec.revision}", safe="@")
    before = _recorded(file)
    try:
        now = spec.pinned(key)
    except KvxferError:
        if before is None:
            raise
        return replace(spec, revision=before)
    if before is None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, now.revision)
        except OSError as error:
            if _recorded(file) == now.revision:  # another process was faster
                return now
            raise KvxferError(f"cannot write to {file.parent} (paths.outputs): {error.strerror}") from error
    elif before != now.revision:
        raise KvxferError(
            f"{key}.revision: {spec.revision!r} of {spec.model} is now commit {now.revision}, and what lies in "
            f"{outputs} is of {before}: set {key}.revision={before} to go on with that, or "
            f"{key}.revision={now.revision} for the new one"
        )
    return now


def _recorded(file: Path) -> str | None:
    """The commit in a file; None where there is none, or the file is damaged."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if COMMIT.fullmatch(text) else None
