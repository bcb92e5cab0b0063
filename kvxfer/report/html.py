"""A report as one HTML page that needs nothing else: figures as data, styles inside, no script.

What stands before the first section is the first screen; the sections fold out.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from kvxfer.report.prose import anchor
from kvxfer.report.style import CSS

log = logging.getLogger("kvxfer")

MEDIA = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
SENTENCE = 40
"""Characters from which a table's cell is told in several lines."""


def page(text: str, folder: Path) -> str:
    """The page of a report.

    Args:
        text: the report's Markdown; tags in it are shown, not followed.
        folder: where the paths of its figures start. One that is not there is told by its description.
    """
    reader = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    tokens = reader.parse(text)
    _number_headings(tokens)
    title = next((_words(tokens[i + 1]) for i, token in enumerate(tokens) if token.tag == "h1"), "Report")
    starts = [i for i, token in enumerate(tokens) if token.type == "heading_open" and token.tag == "h2"]
    first, *sections = (tokens[a:b] for a, b in pairwise([0, *starts, len(tokens)]))

    def html(some: Sequence[Token]) -> str:
        return str(reader.renderer.render(some, reader.options, {"folder": folder}))

    heading = 3 if first and first[0].tag == "h1" else 0
    screen = f'{html(first[:heading])}<div class="first">\n{html(first[heading:])}</div>\n'
    body = screen + "".join(_folded(html(each[:3]), html(each[3:]), each[0]) for each in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _folded(heading: str, content: str, opening: Token) -> str:
    """A section that folds out, also when a link leads to it: the link's target is inside."""
    inside = f'<div id="{escape(str(opening.meta["anchor"]))}">\n{content}</div>\n'
    return f"<details>\n<summary>{heading.strip()}</summary>\n{inside}</details>\n"


def _words(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [] if child.type in ("text", "code_inline"))


def _number_headings(tokens: Sequence[Token]) -> None:
    """Give every heading its anchor; one that is there already gets a number."""
    known: dict[str, int] = {}
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            name = anchor(_words(inline))
            count = known[name] = known.get(name, -1) + 1
            found = f"{name}-{count}" if count else name
            if token.tag == "h2":
                token.meta["anchor"] = found
            else:
                token.attrSet("id", found)


class _Renderer(RendererHTML):
    """HTML of the tokens; what would point outside the page is taken in, or left out."""

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """A figure with its description below, its file as data."""
        token = tokens[idx]
        words = escape(_words(token))
        file = env["folder"] / unquote(str(token.attrGet("src")))
        media = MEDIA.get(file.suffix.lower())
        if media is None or not file.is_file():
            log.warning("%s: no such figure; the page has its description only", file.name)
            return f"<em>{words}</em>"
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        # A figure is allowed in a paragraph's place only.
        return f'<img alt="{words}" src="data:{media};base64,{data}"><span class="caption">{words}</span>'

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """Links within the page and to the web; a neighbour's path would lead nowhere once the page is sent on."""
        target = str(tokens[idx].attrGet("href"))
        kept = target.startswith(("#", "https://"))
        return f'<a href="{escape(target)}">' if kept else "<a>"

    def td_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """A cell; a sentence in it may take several lines."""
        if len(tokens[idx + 1].content) > SENTENCE:
            tokens[idx].attrSet("class", "said")
        return self.renderToken(tokens, idx, options, env)

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """A wide table moves sideways in a box of its own; the page does not."""
        return '<div class="wide" tabindex="0">\n<table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """The end of table and box."""
        return "</table>\n</div>\n"
