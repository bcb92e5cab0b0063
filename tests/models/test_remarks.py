"""What libraries warn of is kept, and not said on stderr; advice about their code is left where it was."""

from __future__ import annotations

import logging
import warnings

import pytest
from transformers.utils import logging as library

from kvxfer.models.remarks import remarks

LOGGER = library.get_logger("transformers.some.module")


def test_warnings_are_kept_each_once_and_loggers_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger("transformers")
    before = (root.handlers[:], root.level, root.propagate)
    library.set_verbosity_error()  # as somebody who wants silence sets it
    try:
        for _ in range(2):
            with remarks("transformers") as said:
                for _ in range(2):
                    LOGGER.warning("a number\nis  %s", "another")
                    LOGGER.warning_once("once")
                LOGGER.info("no warning")
                warnings.warn("a converted tokenizer differs", UserWarning, stacklevel=1)
            assert said == ["a number is another", "once", "a converted tokenizer differs"]
            assert root.level == logging.ERROR
    finally:
        root.setLevel(before[1])
    assert (root.handlers[:], root.level, root.propagate) == before
    assert capfd.readouterr() == ("", "")


def test_warnings_about_code_are_not_kept_and_not_lost() -> None:
    with pytest.warns(FutureWarning, match="will go"), remarks("transformers") as said:
        warnings.warn("will go", FutureWarning, stacklevel=1)
    assert said == []


def test_an_error_leaves_the_loggers_as_they_were() -> None:
    root = logging.getLogger("transformers")
    before = (root.handlers[:], root.level, root.propagate)
    with pytest.raises(ZeroDivisionError), remarks("transformers"):
        raise ZeroDivisionError
    assert (root.handlers[:], root.level, root.propagate) == before


def test_of_very_many_and_very_long_ones_the_beginning_is_kept() -> None:
    with remarks("transformers") as said:
        for number in range(100):
            LOGGER.warning("%d %s", number, "x" * 1000)
    assert len(said) == 21
    assert [len(line) for line in said[:20]] == [300] * 20
    assert said[20] == "there were more warnings"
