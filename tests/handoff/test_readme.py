"""README's example of a handoff, word for word, and its command: the map is small, all else is the toy pair's own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from kvxfer.experiment.cli import main
from kvxfer.experiment.stages.fit import fitted_id
from kvxfer.maps.artifact import CacheMap
from tests.handoff.serving import keep, record
from tests.small_runs import run, settings_of

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Hand over")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", SECTION, flags=re.DOTALL)
MAP = "outputs/train/e4b9e5041dda"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example may be run: a map under the name that the demo's has, admitted by what is said of it."""
    home = tmp_path_factory.mktemp("readme")
    rows = ["corpus.rows.fit=96", "corpus.rows.validation=16", "corpus.rows.held_out=16"]
    fitted = run("train", home / "elsewhere", "pair=toy", "features=previous", "calibration.metrics=false", *rows)
    shutil.copytree(fitted, home / MAP)
    keep(home / MAP, record(CacheMap.load(home / MAP)))
    return home


def test_the_map_that_the_handoff_of_the_readme_names_is_the_demo_s(tmp_path: Path) -> None:
    assert fitted_id(settings_of("train", tmp_path)) == Path(MAP).name
    assert MAP in SECTION


def test_the_readme_s_handoff(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, code),) = [block for block in BLOCKS if block[0] == "python"]
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "red applied None\n"


def test_the_readme_s_handoff_on_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, text),) = [block for block in BLOCKS if "kvxfer generate" in block[1]]
    echo, command = text.replace("\\\n", "").splitlines()
    monkeypatch.chdir(folder)
    *_, said, _, file = shlex.split(echo)
    (folder / file).write_text(said)
    main([*shlex.split(command)[1:], "--log", "handoffs.jsonl"])
    answer, status, tokens, time, flops = capsys.readouterr().out.splitlines()
    assert (answer, status) == ("red", "status: applied")
    assert re.fullmatch(r"tokens: \d+ mapped, 5 read by the target", tokens)
    assert re.fullmatch(r"time: \S+ ms to hand over, \S+ ms for the target's own prefill: \S+ ms (saved|lost)", time)
    assert re.fullmatch(r"FLOPs: \S+ % of that prefill's, \S+ % saved", flops)
    assert json.loads((folder / "handoffs.jsonl").read_text())["status"] == "applied"
    # Without a policy, the strict one: nothing was timed here.
    main(
        ["generate", MAP, "--source", "toy-source", "--target", "toy-target", "--prompt", "color hat red . | color hat"]
    )
    assert "status: fallback (not_timed: policy.min_tokens=measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--source", "no/such/folder/here"], "error: pair.source.model: no folder"),
        (["--policy", "missing.yaml"], "error: policy"),
        (["--evidence", "missing"], "error: evidence: missing is no folder"),
        (["--prompt", ""], "error: generate: the prompt has no tokens"),
    ],
)
def test_a_handoff_that_is_asked_for_wrongly_is_told_in_a_line(
    changed: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = {"--source": "toy-source", "--target": "toy-target", "--prompt": "color hat red ."}
    given |= dict([changed])
    with pytest.raises(SystemExit) as exit:
        main(["generate", MAP, *(word for pair in given.items() for word in pair)])
    assert str(exit.value).startswith(said)
