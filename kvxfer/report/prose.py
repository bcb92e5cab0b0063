"""Sentences and pages: small words around texts, and the templates of whole sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvxfer.report import numbers


def fill(template: str, **values: Any) -> str:
    """A template of ``templates/`` with its values; how numbers are written are its filters.

    Lines of one paragraph or list item are joined, so that a template may break them where it likes.
    """
    text = _environment().get_template(f"{template}.md.j2").render(values)
    return re.sub(r"(?<=[^\n|])\n(?=[^\n|#!*-])", " ", text)


@cache
def _environment() -> Environment:
    folder = Path(__file__).parent / "templates"
    # What is made is Markdown: names in it are made harmless by plain_text, and the page shows tags as text.
    found = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    written = (numbers.percent, numbers.points, numbers.number, numbers.interval, numbers.quantity, numbers.p_text)
    found.filters |= {each.__name__: each for each in (*written, plain_text, listed)}
    return found


def plain_text(text: object) -> str:
    """A name or message on one line that no reader of Markdown takes for a tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", r"\\<", " ".join(str(text).split()))


def anchor(heading: str) -> str:
    """The name that a link to a heading uses, as common viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def listed(parts: Sequence[object]) -> str:
    """``a, b and c``."""
    said = [str(part) for part in parts]
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return text[:1].upper() + text[1:]
