"""Documents of a data set on the Hugging Face hub, streamed: only what is used is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvxfer.errors import KvxferError

SHUFFLE_BUFFER = 1000


def documents(dataset: str, subset: str | None, revision: str | None, column: str, seed: int) -> Iterator[str]:
    """The texts of the ``train`` split in the stream's own order; a ``seed`` other than 0 shuffles it.

    Raises :class:`KvxferError` when the hub is switched off or out of reach, the data set is unknown, or a record has
    no text in ``column``.
    """
    name = dataset if subset is None else f"{dataset}/{subset}"
    for record in _stream(name, dataset, subset, revision, seed):
        text = record.get(column)
        if not isinstance(text, str):
            raise KvxferError(
                f"corpus.column={column!r}: a record of {name} has no text there (it holds {', '.join(record)}); "
                "set corpus.column to one of them"
            )
        yield text


def _stream(name: str, dataset: str, subset: str | None, revision: str | None, seed: int) -> Iterator[dict[str, Any]]:
    import datasets

    # Whatever goes wrong between here and the hub (many exception classes of several libraries) is the corpus's.
    try:
        stream = datasets.load_dataset(dataset, subset, split="train", streaming=True, revision=revision)
        if seed:
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        yield from stream
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> KvxferError:
    from datasets import config
    from datasets.exceptions import DatasetNotFoundError

    if config.HF_HUB_OFFLINE:
        return KvxferError(
            f"corpus.dataset={name}: the Hugging Face hub is switched off (HF_HUB_OFFLINE is set); "
            "unset it, or use corpus=text corpus.path=<folder>"
        )
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, DatasetNotFoundError):
        return KvxferError(
            f"corpus.dataset={name}: no such data set on the hub ({first_line}); check the id and access"
        )
    return KvxferError(
        f"corpus.dataset={name}: cannot be read ({type(error).__name__}: {first_line}); "
        "check corpus.dataset, corpus.subset, corpus.revision and the network, or use corpus=text corpus.path=<folder>"
    )
