"""What a person at the command line sees: quick help, and one readable line for every mistake."""

from __future__ import annotations

import importlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.experiment.cli import COMMANDS, main
from kvxfer.experiment.command import run

ROOT = Path(__file__).parents[2]
STAGES = ("calibrate", "train", "evaluate")
TINY_ROWS = ["corpus.length=32", "corpus.rows.fit=4", "corpus.rows.validation=2", "corpus.rows.held_out=2"]

HEAVY = ("torch", "lightning", "transformers", "datasets", "wandb", "scipy", "matplotlib")
COMPOSING = ("hydra", "omegaconf")
NO_CONFIG = [("kvxfer",), ("kvxfer", "--help"), ("kvxfer", "report", "--help")]
LOOK = """
import contextlib, io, json, runpy, sys
seen = []
for command in json.loads(sys.argv[1]):
    sys.argv = command
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        if command[0].endswith(".py"):
            runpy.run_path(command[0], run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__")
    seen.append((said.getvalue().strip().splitlines(), sorted(sys.modules)))
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def helps() -> dict[tuple[str, ...], tuple[list[str], set[str]]]:
    """By the command: the lines that it prints, which are all that it says, and what it and those before imported."""
    scripts = [(str(ROOT / f"{stage}.py"), "--help") for stage in STAGES]
    commands = [*NO_CONFIG, ("kvxfer", "demo", "--help"), *(("kvxfer", stage, "--help") for stage in STAGES), *scripts]
    # One process for all: the first ones need the least.
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(commands)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    return {command: (text, set(modules)) for command, (text, modules) in zip(commands, seen, strict=True)}


@pytest.fixture(autouse=True)
def _commands_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logging is set up anew by every command, and put back afterwards."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    ours, root = logging.getLogger("kvxfer"), logging.getLogger()
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (ours, root)]
    ours.handlers = []
    yield
    for logger, logger.handlers, level, logger.propagate in before:
        logger.setLevel(level)


@pytest.fixture
def mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Give a command that ends in a mistake; returns the line that it ends with, which is all of stderr."""

    def ended(stage: str, *arguments: str, alone: bool = True) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{stage}.py", *arguments, "logger=disabled"])
        with pytest.raises(SystemExit) as exit_:
            run(stage)
        # sys.exit with a text: Python prints it on stderr and exits with 1.
        line = exit_.value.code
        assert isinstance(line, str)
        assert "\n" not in line
        assert line.startswith("error: ")
        assert len(line) < 400
        if alone:
            assert capsys.readouterr().err == ""
        return line

    return ended


@pytest.mark.parametrize("stage", STAGES)
def test_help_shows_the_groups_and_imports_nothing_heavy(stage, helps):
    text, _ = helps["kvxfer", stage, "--help"]
    by_script, imported = helps[str(ROOT / f"{stage}.py"), "--help"]
    assert by_script == text
    assert not imported & set(HEAVY)
    groups = {line.split(":")[0] for line in text}
    expected = {
        "pair",
        "corpus",
        "calibration",
        "logger",
        "features",
        "solver",
        "penalty",
        "rank",
        "trainer",
        "plan",
        "eval",
    }
    assert expected <= groups


@pytest.mark.parametrize("command", NO_CONFIG)
def test_what_needs_no_config_imports_nothing_of_it(command, helps):
    text, imported = helps[command]
    assert text[0].startswith("usage: kvxfer")
    assert not imported & {*HEAVY, *COMPOSING}


def test_the_help_of_the_demo_names_its_designs(helps):
    text, imported = helps["kvxfer", "demo", "--help"]
    assert text == ["kvxfer demo [overrides of evaluate]: evaluate the designs same, both, previous"]
    assert not imported & set(HEAVY)


def test_every_command_is_in_the_help_and_has_its_function(capsys):
    main(["-h"])
    shown = capsys.readouterr().out
    for name, (module, does) in COMMANDS.items():
        assert re.search(rf"^  {name} +{does}$", shown, re.MULTILINE)
        assert callable(getattr(importlib.import_module(module), name))


def test_an_unknown_command_is_refused_in_one_line():
    with pytest.raises(SystemExit, match=r"^error: 'trian' is no command of kvxfer; there are calibrate, train, eval"):
        main(["trian", "pair=toy"])


@pytest.mark.parametrize(
    "given", [("--cfg", "job", "pair.source=x"), ("-cd", "sweeps", "-cn", "alpha", "--cfg", "job")]
)
def test_a_subcommand_composes_what_the_script_does(given, monkeypatch, capsys):
    given = (*given, "--cfg", "job")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    run("train")
    by_script = capsys.readouterr().out
    assert by_script.startswith("pair:")
    main(["train", *given])
    assert capsys.readouterr().out == by_script


def test_processes_that_train_together_are_given_the_same_command(monkeypatch, tmp_path):
    """Lightning starts them with sys.argv, which Hydra has been shown without the subcommand."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvxfer.experiment.stages.train.train", lambda _: found.append(sys.argv) or tmp_path)
    typed = ["bin/kvxfer", "train", "solver=ridge"]
    monkeypatch.setattr(sys, "argv", typed)
    main()
    assert found == [typed]
    assert sys.argv == typed


WRONG = [
    ("train", ["penalty.lam=abc"], "penalty.lam=abc must be a number of 0 or more, or auto"),
    ("train", ["penalty.lam=-1"], "penalty.lam=-1"),
    ("train", ["penalty.lam=nan"], "penalty.lam=nan must be"),
    ("train", ["penalty.lam=.inf"], "penalty.lam=.inf must be"),
    ("train", ["penalty.lam=null"], "penalty.lam=null"),
    ("train", ["penalty.lam=true"], "penalty.lam=true"),
    ("train", ["penalty.lam=[1,2]"], "penalty.lam=[1,2]"),
    ("train", ["penalty.lam=1,2"], "Ambiguous value for argument 'penalty.lam=1,2'"),
    ("train", ["solver.k=0"], "solver.k=0 must be 1 or more"),
    ("train", ["solver.k=abc"], "solver.k=abc"),
    ("train", ["solver.k=1.5"], "solver.k=1.5"),
    ("train", ["solver.selection=nope"], "solver.selection='nope'"),
    ("train", ["solver.selection_lam=-1"], "solver.selection_lam=-1"),
    ("train", ["paths.outputs=~/x"], "without quotes: write 'paths.outputs=\"~/x\"'"),
    ("train", ["solver.k"], "Error parsing override 'solver.k'"),
    ("train", ["corpus.num_shards=2"], "corpus.num_shards=2: only calibrate.py shares rows"),
    ("evaluate", ["corpus.num_shards=2"], "corpus.num_shards=2: only calibrate.py shares rows"),
    (
        "train",
        ["pair=nope"],
        "Could not find 'pair/nope'. Available options in 'pair': custom, geometry, llama3.1_8b_70b",
    ),
    (
        "train",
        ["features=nope"],
        "Available options in 'features': auto, both, embedding, hidden, layer0, previous, products, relu, rich, same",
    ),
    ("train", ["rank=8"], "rank=8: choose an option of 'rank': full"),
    ("train", ["solver=8"], "solver=8: choose an option of 'solver': "),
    ("train", ["-m", "rank=8,full"], "job 0 (rank=8): rank=8: choose an option of 'rank'"),
    ("train", ["rank=null"], "rank=null: choose an option of 'rank'"),
    ("train", ["penalty.lamb=1"], "'penalty.lamb': no such key"),
    ("train", ["+penalty.lamb=1"], "penalty.lamb: no such key; penalty.has name, lam"),
    ("train", ["+corpus.rows.x=1"], "corpus.rows.x: no such key"),
    ("train", ["+lamb=1"], "lamb: no such key; the config has pair,"),
    ("train", ["~penalty"], "penalty.name is not set"),
    ("train", ["penalty.name=nope"], "penalty.name='nope' is none of isotropic"),
    ("calibrate", ["solver=ridge"], "Could not override 'solver'"),
    ("calibrate", ["corpus.length=0"], "corpus.length=0: must be at least 2"),
    ("calibrate", ["corpus.length=4", "corpus.skip_first=4"], "corpus.skip_first=4 leaves nothing of corpus.length=4"),
    ("calibrate", ["corpus.kind=nope"], "corpus.kind='nope'"),
    ("calibrate", ["corpus.num_shards=2", "corpus.shard_index=2"], "corpus.shard_index=2 with corpus.num_shards=2"),
    ("calibrate", ["calibration.stride=0"], "calibration.stride=0 must be 1"),
    ("calibrate", ["calibration.features=nope"], "calibration.features='nope' is none of same, both, previous"),
    ("calibrate", ["pair.features=nope"], "pair.features='nope' is none of"),
    ("calibrate", ["logger.wandb=loud"], "logger.wandb='loud'"),
    ("calibrate", ["corpus=text"], "corpus.path is not set"),
    ("calibrate", ["pair=custom"], "pair.source.model is not set"),
    ("calibrate", ["pair=custom", "pair.source.model=a/b"], "pair.target.model is not set"),
    ("calibrate", ["paths.outputs=${nope}"], "paths.outputs: Interpolation key 'nope' not found"),
    ("train", ["features=auto", "features.kinds=both"], "features.kinds=both has no effect with features=auto"),
    ("train", ["features=same", "features.previous=-1"], "features.previous=-1 must be 0 or more"),
    ("evaluate", ["plan.hold_back=0"], "plan.hold_back=0 must be 1 or more"),
    ("evaluate", ["plan.exact_first=-1"], "plan.exact_first=-1 must be 0 or more"),
    ("evaluate", ["eval.stories=0"], "eval.stories=0 must be 2 or more"),
    ("evaluate", ["eval.batch_size=1"], "eval.batch_size=1 must be 2 or more"),
    ("evaluate", ["map=nope"], "map=nope is no"),
    ("train", ["-cn", "nope"], "Cannot find primary config 'nope'"),
    ("train", ["-cn", "calibrate"], "the config (-cn) is not one of the train stage"),
    ("train", ["-cd", "/no/such/folder"], "'/no/such/folder' not found"),
    ("train", ["pair.source=/no/such/model"], "pair.source.model: no folder '/no/such/model'"),
    ("train", ["pair.source.model=/no/such/model"], "pair.source.model: no folder '/no/such/model'"),
]


@pytest.mark.parametrize(("stage", "arguments", "said"), WRONG, ids=[" ".join(case[1]) for case in WRONG])
def test_a_mistake_in_the_config_is_one_line(mistake, stage, arguments, said):
    assert said in mistake(stage, *arguments)


@pytest.fixture
def models(tiny_folders: tuple[Path, Path]) -> list[str]:
    """Overrides for the tiny random pair and a tiny corpus."""
    source, target = tiny_folders
    return [f"pair.source.model={source}", f"pair.target.model={target}", "pair.device=cpu", "solver.k=1", *TINY_ROWS]


@pytest.mark.parametrize(
    ("stage", "argument", "said"),
    [
        ("train", "calibration.layers=[99]", "calibration.layers=[99]: the source has layers 0 to 1"),
        ("train", "solver.k=99", "solver.k=99 must be from 1 to 2"),
        ("train", "pair.dtype=float17", "pair.dtype: 'float17' is not supported; use one of float32"),
        ("train", "pair.device=nope", "pair.device: 'nope' is no device"),
        ("train", "pair.attention=nope", "pair.attention: 'nope' is not supported"),
        ("train", "corpus.length=100000", "corpus.length: 100000 tokens, but"),
        ("train", "build_missing=false", "or set build_missing=true"),
        ("evaluate", "build_missing=false", "or set build_missing=true"),
        ("calibrate", "corpus.skip_first=31 calibration.stride=2 corpus.rows.fit=0", "no token is kept"),
    ],
)
def test_a_mistake_that_needs_the_models_to_show_ends_in_one_line(mistake, models, stage, argument, said):
    fitting = models if stage != "calibrate" else [m for m in models if not m.startswith("solver")]
    assert said in mistake(stage, *fitting, *argument.split(), alone=False)


@pytest.mark.parametrize("where", ["a_file", "a_file/below", "/proc/outputs"])
@pytest.mark.parametrize("many", [(), ("-m",)])
def test_outputs_that_cannot_be_written_are_named(mistake, models, tmp_path, where, many):
    (tmp_path / "a_file").write_text("")
    line = mistake("train", *many, *models, f"paths.outputs={where}", alone=False)
    assert where in line


def test_a_real_command_prints_one_line_and_exits_with_one(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "penalty.lam=abc"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: penalty.lam=abc must be a number of 0 or more, or auto\n"


def test_full_errors_on_request(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "solver.k=0"])
    with pytest.raises(ValueError, match=r"solver\.k=0"):
        run("train")


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(settings: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvxfer.experiment.stages.train.train", broken)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ZeroDivisionError):
        run("train")


def test_an_interrupt_says_that_the_same_command_goes_on(monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvxfer.experiment.stages.train.train", interrupted)
    monkeypatch.setattr(sys, "argv", ["train.py", f"paths.outputs={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        run("train")
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith(
        "interrupted: give the same command again and it goes on from what is finished\n"
    )
