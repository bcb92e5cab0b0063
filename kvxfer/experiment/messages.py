"""What a command says on stderr: plain messages, and every mistake as one readable line."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from kvxfer.errors import KvxferError, file_error
from kvxfer.experiment.config import config_directory


def set_up_logging() -> None:
    """Plain messages of this package on stderr; results go to stdout."""
    logger = logging.getLogger("kvxfer")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    # Of several processes that train together the first one speaks.
    logger.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.ERROR)
    logger.propagate = False
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="wandb")


def well_told(error: Exception) -> bool:
    """Whether an error is told well enough by its message, or by what is made of it: the file system's."""
    return isinstance(error, KvxferError | HydraException | OmegaConfBaseException) or file_error(error) is not None


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, and without Hydra's list of search paths."""
    from_hydra, cause = isinstance(error, HydraException), error.__cause__
    # Some of Hydra's are of the class of the file system's.
    told = None if from_hydra else file_error(error)
    text = str(told or error).split("Config search path:")[0]
    if from_hydra and isinstance(cause, OmegaConfBaseException | HydraException) and str(cause) not in text:
        text += f": {str(cause).splitlines()[0]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("Available options")), None)
    if first is not None:
        lines = [*lines[:first], f"{lines[first]} {', '.join(lines[first + 1 :])}"]
    line = ". ".join(line.rstrip(".") for line in lines)
    # Hydra's hint would only make it swallow the typo.
    line = re.sub(r"\. To append to your (config|default list) use .*", ": no such key (--cfg job shows all)", line)
    return line or type(error).__name__


def wrong_option(arguments: Sequence[str], error: BaseException) -> str | None:
    """What is wrong where Hydra refuses the type of an option's name (``rank=8``); its own message names no group."""
    if not str(error).startswith("Config group override must be a string"):
        return None
    for argument in arguments:
        group, _, value = argument.partition("=")
        options = sorted(file.stem for file in (config_directory() / group).glob("*.yaml")) if group else []
        if options and not set(value.split(",")) <= set(options):
            return f"{argument}: choose an option of {group!r}: {', '.join(options)}"
    return None


def badly_quoted(error: BaseException) -> str | None:
    """How to quote an override whose value Hydra's grammar does not take as it is (``~/x``, ``a=b``, ``/ä``)."""
    if not isinstance(error, OverrideParseException):
        return None
    key, given, value = error.override.partition("=")
    quoted = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:  # it is not the value
        return None
    if not given:
        return None
    # The outer quotes are for the shell.
    several = "; of several values quote each" if re.match(r"[\[{]|\w+\(|.*,", value) else ""
    return f"{error.override}: Hydra can't read this value without quotes: write {shlex.quote(quoted)}{several}"
