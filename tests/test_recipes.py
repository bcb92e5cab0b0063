"""CONTRIBUTING's recipes, followed to the letter on a copy of the tree: they must give what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = r"`([^`]+)`"
WARM = """
import os, shlex, sys
import lightning, matplotlib.pyplot, scipy.stats, torchmetrics, transformers.models.qwen3
import pytest
for command in sys.stdin:
    child = os.fork()
    if not child:
        with open("said.txt", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        sys.path.insert(0, os.getcwd())
        code = pytest.main(shlex.split(command)[1:])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Does what ``pytest ...`` does, for every line that it is given, without importing the libraries anew."""


class Follower:
    """Does what numbered steps say, in a copy of the tree."""

    def __init__(self, tree: Path, process: subprocess.Popen[str]) -> None:
        self.tree, self.process, self.ran = tree, process, 0
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
        assert command.startswith("pytest "), command
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        code = self.process.stdout.readline()
        assert code == "0\n", f"{command}\n{(self.tree / 'said.txt').read_text()[-6000:]}"
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


@pytest.fixture(scope="module")
def process(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """What runs the recipes' commands there."""
    # pytest would rewrite the asserts of every plugin's package that is installed, and of one the libraries use.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "jaxtyping._pytest_plugin,pytest_timeout"}
    environment = {**os.environ, **plugins, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the next recipe's command reads what this one compiled
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WARM], cwd=tree, env=environment, **pipes) as running:
        yield running
        running.terminate()


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_followed_to_the_letter_works(name: str, tree: Path, process: subprocess.Popen[str]) -> None:
    follower = Follower(tree, process)
    for step in recipes()[name]:
        follower.follow(step)
    assert follower.ran, "a recipe ends with a command that shows that it worked"


def test_there_is_a_recipe_for_what_people_add() -> None:
    assert set(recipes()) == {"Add a solver", "Add a pair", "Add an evaluation"}
