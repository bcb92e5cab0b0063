"""A report as one HTML page that needs nothing else: figures as data, styles inside, no script.

What stands before the first section is the first screen; the sections fold out. It is made for a screen, a phone and
paper, by day and by night.
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

log = logging.getLogger("kvxfer")

MEDIA = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
SENTENCE = 40
"""Characters from which a table's cell is told in several lines."""


CSS = """\
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5f6c7b; --line: #d9dee4; --page: #ffffff; --tint: #f5f7f9;
  --strong: #1d6fb8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ed; --muted: #9aa7b4; --line: #36404a; --page: #14191e; --tint: #1c2329; --strong: #7db8ea; }
  img { filter: brightness(.9); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; overflow-wrap: break-word; }
p, li { max-width: 46rem; }
h1, h2, h3, h4 { line-height: 1.25; margin: 2em 0 .6em; }
h1 { font-size: 1.75rem; margin-top: .5em; }
h2 { font-size: 1.15rem; margin: 0; display: inline; }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { padding: .7rem 0; cursor: pointer; }
summary:hover h2 { color: var(--strong); }
details > div { padding-bottom: 1.5rem; }
h3 { font-size: 1.08rem; }
h4 { font-size: 1rem; }
.first { margin-bottom: 2rem; }
.first ul { padding-left: 1.2rem; margin-top: 0; }
.first > p:first-child { border-left: 4px solid var(--strong); background: var(--tint); padding: .8rem 1rem;
  margin: 0 0 1.2rem; }
.first > p:first-child strong { font-weight: 600; }
.first > p:has(img) { margin: 0; max-width: none; }
@media (min-width: 60rem) {
  .first:has(img) { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); column-gap: 2rem; }
  .first > p:has(img) { grid-column: 2; grid-row: 1 / span 20; }
  .first > .wide { grid-column: 1 / -1; grid-row: 21; }
}
a[href] { color: var(--strong); }
code { background: var(--tint); border: 1px solid var(--line); border-radius: 3px; padding: 0 .25em; font-size: .9em; }
pre { background: var(--tint); border: 1px solid var(--line); padding: .8rem; overflow-x: auto; }
pre code { background: none; border: 0; padding: 0; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; text-align: left;
  white-space: nowrap; }
td { max-width: 30rem; }
th { color: var(--muted); font-weight: 600; border-bottom-width: 2px; white-space: normal; vertical-align: bottom;
  min-width: 5.4em; }
td:first-child, th:first-child { padding-left: 0; }
tbody tr:hover { background: var(--tint); }
td.said { white-space: normal; min-width: 16rem; }
img { display: block; max-width: 100%; height: auto; margin: 0 0 .3rem; background: #fff; border-radius: 4px; }
.caption { display: block; color: var(--muted); font-size: .875rem; margin-bottom: 1.2rem; }
hr { border: 0; border-top: 1px solid var(--line); margin: 2.5rem 0; }
@media (max-width: 40rem) {
  main { padding: 1rem .9rem 3rem; }
  h1 { font-size: 1.4rem; }
  table { font-size: .8rem; }
  th { min-width: 0; }
  td:first-child { white-space: normal; min-width: 7.5rem; }
  td.said { min-width: 9.5rem; }
}
@media print {
  details::details-content { content-visibility: visible; height: auto; }
  :root { --ink: #000; --muted: #444; --line: #bbb; --page: #fff; --tint: #fff; --strong: #000; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .25rem .4rem; white-space: normal; }
  h2, h3, h4 { break-after: avoid; }
  img, tr { break-inside: avoid; }
}
"""


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
