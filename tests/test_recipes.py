"""CONTRIBUTING's recipes, followed to the letter on a copy of the tree: they must give what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = r"`([^`]+)`"


class Follower:
    """Does what numbered steps say, in a copy of the tree."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.ran = tree, 0
        self.file = tree
        self.verbs: dict[str, Callable[..., None]] = {
            rf"[Cc]opy {CODE} to {CODE}": self.copy,
            rf"[Rr]eplace {CODE} by {CODE}": self.replace,
            rf"[Ii]n {CODE}": self.open,
            rf"add {CODE} after {CODE}": self.add,
            rf"add the line {CODE} below {CODE}": self.add_line,
            rf"[Rr]un {CODE}": self.run,
        }

    def follow(self, step: str) -> None:
        """One step, from left to right."""
        found = [(m.start(), do, m) for verb, do in self.verbs.items() for m in re.finditer(verb, step)]
        assert found, f"nothing to do in: {step}"
        for _, do, match in sorted(found, key=lambda each: each[0]):
            do(*match.groups())

    def copy(self, old: str, new: str) -> None:
        assert not (self.tree / new).exists(), new
        shutil.copyfile(self.tree / old, self.tree / new)
        self.file = self.tree / new

    def open(self, name: str) -> None:
        self.file = self.tree / name

    def replace(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text, f"{self.file.name} has no {old}"
        self.file.write_text(text.replace(old, new))

    def add(self, text: str, anchor: str) -> None:
        assert self.file.read_text().count(anchor) == 1, f"{self.file.name} must have {anchor} once"
        self.replace(anchor, anchor + text)

    def add_line(self, line: str, anchor: str) -> None:
        places = [each for each in self.file.read_text().splitlines() if each.strip() == anchor]
        assert len(places) == 1, f"{self.file.name} must have the line {anchor} once"
        indent = "    " if anchor.endswith(("{", "(", "[")) else ""
        self.replace(f"{places[0]}\n", f"{places[0]}\n{indent}{line}\n")

    def run(self, command: str) -> None:
        here = {"PYTHONPATH": str(self.tree), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        environment = {**os.environ, **here}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the next recipe's command reads what this one compiled
        done = subprocess.run(
            command, shell=True, cwd=self.tree, env=environment, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.ran += 1


def recipes() -> dict[str, list[str]]:
    """The numbered steps of every section that says how to add something."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sections = re.findall(r"^## (Add [^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return {
        name: [
            " ".join(step.split())
            for step in re.findall(r"^\d+\. (.*?)(?=^\d+\. |\n\n|\Z)", body, re.DOTALL | re.MULTILINE)
        ]
        for name, body in sections
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows, and of what is new, in which the recipes are followed one after the other."""
    copy = tmp_path_factory.mktemp("tree")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_followed_to_the_letter_works(name: str, tree: Path) -> None:
    follower = Follower(tree)
    for step in recipes()[name]:
        follower.follow(step)
    assert follower.ran, "a recipe ends with a command that shows that it worked"


def test_there_is_a_recipe_for_what_people_add() -> None:
    assert set(recipes()) == {"Add a solver", "Add a pair", "Add an evaluation"}
