"""What a command line may hold: any text once it is quoted, the same in one run and in a sweep, in any folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from launching import run_sweep
from omegaconf import OmegaConf

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import compose, job_config, load_job, plain, quoted, save_job, spelled_out
from kvxfer.experiment.messages import badly_quoted

TEXTS = [r"my${b}text", r"a\${b}", r"end\\", r"${${", "it's", "\"both\" 'kinds'", "a=b", "a,b c", "~/Übung", r"C:\new"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, Any]]:
    """The folder and the settings of every run that would have been made, all of a home in ``tmp_path``."""
    found: list[tuple[Path, Any]] = []

    def train(settings: Any) -> None:
        found.append((Path.cwd(), settings))
        raise KvxferError("not run")

    monkeypatch.setattr("kvxfer.experiment.stages.train.train", train)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return found


def test_a_sweep_takes_what_one_run_takes(asked: list[tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "; ".join(TEXTS)
    given = ["corpus=text", f"corpus.path={quoted(text)}", f"paths.outputs={quoted(f'out/{TEXTS[0]}')}"]
    run_sweep(monkeypatch, "train", *given, "penalty.lam=1")
    run_sweep(monkeypatch, "train", "-m", *given, "penalty.lam=1,2")
    assert [settings.corpus.path for _, settings in asked] == [text] * 3
    assert {settings.outputs for _, settings in asked} == {Path("out", TEXTS[0])}


def test_a_checked_job_keeps_texts_that_look_like_interpolations(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        config = job_config(compose("train", [f"corpus.path={quoted(text)}"]))
        save_job(tmp_path / f"{number}.yaml", text, config)
        label, loaded = load_job("train", tmp_path / f"{number}.yaml")
        assert (label, loaded.corpus.path) == (text, text)
        assert plain(loaded) == plain(config)
        assert OmegaConf.get_type(config) is OmegaConf.get_type(loaded)


@pytest.mark.parametrize("many", [(), ("-m", "penalty.lam=1,2")])
def test_relative_paths_are_those_of_the_folder_that_the_command_is_given_in(
    many: tuple[str, ...], asked: list[tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["paths.outputs=out", "hydra.job.chdir=true", "hydra.run.dir=elsewhere"]
    end = run_sweep(monkeypatch, "train", *many, *given)
    assert [folder for folder, _ in asked] == [tmp_path] * (2 if many else 1)
    assert end == ("error: 2 of 2 jobs failed" if many else "error: not run")
    assert Path.cwd() == tmp_path
    assert len(list((tmp_path / "out" / "sweeps").glob("*/summary.csv"))) == len(many[:1])


def test_the_home_folder_is_meant_by_a_tilde(
    asked: list[tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_sweep(monkeypatch, "train", "paths.outputs='~/runs'")
    run_sweep(monkeypatch, "train", "-m", "paths.outputs='~/runs'", "penalty.lam=1,2")
    assert {settings.outputs for _, settings in asked} == {tmp_path / "home" / "runs"}
    assert len(list((tmp_path / "home" / "runs" / "sweeps").glob("*/summary.csv"))) == 1


@pytest.mark.parametrize("text", ["~/x", "/data/Übung", "/data/it's", "a=b", "/a/(b)", "[ab]*.txt", "日本", "~/x,~/y"])
def test_a_value_that_needs_quotes_is_told_with_them(text: str) -> None:
    with pytest.raises(OverrideParseException) as wrong:
        OverridesParser.create().parse_overrides([f"corpus.glob={text}"])
    said = badly_quoted(wrong.value)
    assert said is not None
    start, _, written = said.partition(": write ")
    assert start == f"corpus.glob={text}: Hydra can't read this value without quotes"
    shell, _, more = written.partition("; ")
    assert more == ("of several values quote each" if text[0] == "[" or "," in text else "")
    assert compose("train", shlex.split(shell)).corpus.glob == text


def test_a_mistake_in_a_key_is_not_told_as_one_of_quotes() -> None:
    for argument in ("ü=1", "solver.k", "a b=1"):
        with pytest.raises(OverrideParseException) as wrong:
            OverridesParser.create().parse_overrides([argument])
        assert badly_quoted(wrong.value) is None


@pytest.mark.parametrize("identifier", ["012345678901", "12345678e123", "0b0e1f203040"])
def test_the_id_of_a_run_is_no_number(identifier: str) -> None:
    assert compose("evaluate", [f"map={identifier}"]).map == identifier
    assert spelled_out([f"map={identifier},abc"]) == [f"map={identifier},abc"]
    assert spelled_out([f"map={identifier},{identifier}"]) == [f"map='{identifier}','{identifier}'"]
