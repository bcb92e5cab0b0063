"""A report's page stands alone, and shows what its Markdown says."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvxfer.report.document import document, write_pages, written
from kvxfer.report.html import page
from kvxfer.report.table import Table

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
REPORT = """# Pair <b>a|b</b> & co

**It beats the source.**

See [the table](#one), [its home](https://example.org) and [the data](results.json).

## One

| Name | Value |
| :-- | --: |
| a\\|b <script>alert(1)</script> | < 0.001 |
| a sentence that is far too long for a line of a table | 1 |

![A figure](figures/a.png)

![Gone](figures/gone.png)

## One
"""


class Tags(HTMLParser):
    """Every tag of a page, its attributes, and whether all were closed."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def stands_alone(text: str) -> Tags:
    """Check that a page is well formed and that a browser would fetch nothing for it."""
    tags = Tags(text)
    assert tags.open == []
    assert {name for name, _ in tags.found} & {"script", "link", "iframe", "object", "base"} == set()
    for _, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert str(attributes.get("src", "data:")).startswith("data:")
    assert not re.search(r"url\(|@import", text)
    names = {attributes.get("id") for _, attributes in tags.found}
    for link in tags.named("a"):
        target = link.get("href")
        assert target is None or target.startswith("https://") or target.removeprefix("#") in names
    return tags


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(PNG)
    return tmp_path


def test_a_page_stands_alone(folder):
    tags = stands_alone(page(REPORT, folder))
    (image,) = tags.named("img")
    assert image["src"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert image["alt"] == "A figure"
    assert [link.get("href") for link in tags.named("a")] == ["#one", "https://example.org", None]
    assert len(tags.named("details")) == len(tags.named("summary")) == 2
    boxes = tags.named("div")
    assert [box["id"] for box in boxes if "id" in box] == ["one", "one-1"]
    assert [box["class"] for box in boxes if "class" in box] == ["first", "wide"]
    assert [cell.get("class") for cell in tags.named("td")] == [None, None, "said", None]


def test_what_people_named_is_shown_and_not_followed(folder):
    text = page(REPORT, folder)
    assert "<title>Pair &lt;b&gt;a|b&lt;/b&gt; &amp; co</title>" in text
    assert "a|b &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt; 0.001" in text


def test_a_figure_that_is_gone_is_told_by_its_description(folder):
    assert "<em>Gone</em>" in page(REPORT, folder)


def test_markdown_of_names_holds_no_tags(folder):
    table = Table(("Name", "p"), [("<img src=x>|\n</b>", "< 0.001")])
    assert table.markdown()[2] == "| \\<img src=x>\\| \\</b> | < 0.001 |"
    text = document("<i>a</i>", "", [str(table)])
    assert text.startswith("# \\<i>a\\</i>\n")
    assert "&lt;img src=x&gt;| &lt;/b&gt;" in page(text, folder)


def test_both_are_written_and_results_come_last(folder):
    write_pages(REPORT, folder)
    report, html, data = written(folder)
    assert report.read_text() == REPORT
    assert html.read_text() == page(REPORT, folder)
    assert (report.name, html.name, data.name) == ("report.md", "report.html", "results.json")
