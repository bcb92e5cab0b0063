"""A hub pair through the commands: its commits are recorded, and another commit under the same name is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvxfer.errors import KvxferError
from kvxfer.experiment import pins
from kvxfer.experiment.pins import REVISIONS
from kvxfer.experiment.stages import calibrate
from kvxfer.models import digests, hub
from tests.hub_cache import commit_of
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models

NAMES = ("team/small", "team/large")


def toy_pair(folders: Sequence[Path]) -> list[str]:
    """The overrides that a calibration of two models takes."""
    return [option for option in toy_models((folders[0], folders[1])) if not option.startswith("solver")]


PAIR = toy_pair([Path(name) for name in NAMES])
OPTIONS = ["eval=mapped", *TOY_EVAL, *toy_models((Path(NAMES[0]), Path(NAMES[1])))]


@pytest.fixture
def moved(tiny_folders: tuple[Path, Path], hub_cache: Callable[..., Path], tmp_path: Path) -> Callable[[], None]:
    """Both models in the hub's cache as commits 1 and 2; called, it moves the target's ``main`` to other weights.

    The library warns of a key in the target's config.
    """
    target = shutil.copytree(tiny_folders[1], tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"]["beta"] = 3
    (target / "config.json").write_text(json.dumps(config))
    hub_cache(NAMES[0], tiny_folders[0], 1, "main")
    hub_cache(NAMES[1], target, 2, "main")

    def move() -> None:
        other = shutil.copytree(target, tmp_path / "other")
        tensors = load_file(other / "model.safetensors")
        mixed = {name: -tensor if "mlp.down" in name else tensor for name, tensor in tensors.items()}
        save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
        hub_cache(NAMES[1], other, 3, "main")

    return move


def test_commits_and_warnings_are_recorded_and_another_commit_is_refused(
    moved: Callable[[], None], tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    first = run("evaluate", outputs, *OPTIONS)
    [moments], [cache_map] = ([*(outputs / stage).glob("[!.]*")] for stage in ("calibrate", "train"))
    named = [
        json.loads((moments / "calibration.json").read_text())["pair"],
        json.loads((cache_map / "manifest.json").read_text())["pair"],
        results_of(first)["pair"],
        results_of(first)["provenance"]["config"]["pair"],
    ]
    for found in named:
        for side, name, digit in zip(("source", "target"), NAMES, (1, 2), strict=True):
            assert (found[side]["model"], found[side]["revision"]) == (name, commit_of(digit))
    warned = r"target team/large: Unrecognized keys in `rope_parameters` for 'rope_type'='default': {'beta'}"
    assert json.loads((moments / "calibration.json").read_text())["warnings"] == [warned]
    assert results_of(first)["provenance"]["warnings"] == [warned]
    assert f"- Warned: {warned}\n" in (first / "report.md").read_text()
    moved()
    said = r"^pair.target.revision: 'main' of team/large is now commit 3+, and what lies in \S+ is of 2+: set "
    for again in (OPTIONS, [*OPTIONS, "eval.questions=2"], [*OPTIONS, "force=true"], [*OPTIONS, f"map={cache_map}"]):
        with pytest.raises(KvxferError, match=said):
            run("evaluate", outputs, *again)
    # What the line says goes on: the old commit finds what is there, the new one has a question of its own.
    assert run("evaluate", outputs, *OPTIONS, f"pair.target.revision={commit_of(2)}") == first
    newer = [*OPTIONS, f"pair.target.revision={commit_of(3)}"]
    with pytest.raises(KvxferError, match=r"fitted with pair.target.revision = 2+ but this pair has 3+"):
        run("evaluate", outputs, *newer, f"map={cache_map}")
    second = run("calibrate", outputs, *PAIR, f"pair.target.revision={commit_of(3)}")
    assert second != moments
    assert json.loads((second / "calibration.json").read_text())["pair"]["target"]["revision"] == commit_of(3)


def test_what_is_there_is_found_where_neither_hub_nor_cache_is(
    moved: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run("calibrate", tmp_path / "outputs", *PAIR)
    hub._asked.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "nowhere"))
    assert run("calibrate", tmp_path / "outputs", *PAIR) == path
    with pytest.raises(KvxferError, match=r"^pair.source.model: config of 'team/small' can't be read"):
        run("calibrate", tmp_path / "elsewhere", *PAIR)


@pytest.mark.parametrize("content", ["", "main", commit_of(2)[:-1]])
def test_a_damaged_record_of_a_commit_is_made_anew(content: str, moved: Callable[[], None], tmp_path: Path) -> None:
    named = settings_of("calibrate", tmp_path, *PAIR).pair_identity
    record = tmp_path / REVISIONS / "team%2Flarge@main"
    assert record.read_text() == commit_of(2)
    record.write_text(content)
    assert settings_of("calibrate", tmp_path, *PAIR).pair_identity == named
    assert record.read_text() == commit_of(2)


def test_a_branch_and_its_commit_are_one_question(moved: Callable[[], None], tmp_path: Path) -> None:
    named = settings_of("calibrate", tmp_path, *PAIR).pair_identity
    commits = [f"pair.{side}.revision={commit_of(digit)}" for side, digit in (("source", 1), ("target", 2))]
    assert settings_of("calibrate", tmp_path / "other", *PAIR, *commits).pair_identity == named
    assert not (tmp_path / "other").exists()


def test_of_two_processes_that_record_a_commit_at_once_neither_fails(
    moved: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster(path: Path, text: str) -> None:
        path.write_text(text)
        raise FileNotFoundError(2, "No such file or directory")  # the temporary file is the other's by now

    monkeypatch.setattr(pins, "write_text", faster)
    named = settings_of("calibrate", tmp_path, *PAIR).pair_identity
    assert named["target"]["revision"] == commit_of(2)


def test_outputs_that_cannot_be_written_to_are_told(moved: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvxferError, match=r"^cannot write to \S+ \(paths.outputs\): Not a directory"):
        settings_of("calibrate", tmp_path / "file", *PAIR).pair_identity  # noqa: B018


def test_a_second_command_reads_no_model_to_name_it_unless_it_is_to_verify(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in tiny_folders]
    pair = toy_pair(folders)
    read: list[Path] = []
    real = digests._read
    monkeypatch.setattr(digests, "_read", lambda path, advance: (read.append(path), real(path, advance))[1])
    monkeypatch.setattr(digests, "_read_again", set())
    first = settings_of("calibrate", tmp_path, *pair).pair_identity
    assert sorted(read) == sorted(path for folder in folders for path in folder.iterdir())
    digests._read_again.clear()  # another process
    read.clear()
    assert settings_of("evaluate", tmp_path, *pair).pair_identity == first
    assert read == []
    assert settings_of("evaluate", tmp_path, *pair, "verify=true").pair_identity == first
    assert sorted(read) == sorted(path for folder in folders for path in folder.iterdir())


def test_a_model_that_is_another_one_when_it_is_loaded_is_refused(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is named by what the folder held when the command began."""
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in tiny_folders]
    real = calibrate.load_pair

    def changed_before(spec: object) -> object:
        config = folders[0] / "generation_config.json"
        config.write_text(config.read_text() + "\n")
        return real(spec)

    monkeypatch.setattr(calibrate, "load_pair", changed_before)
    with pytest.raises(KvxferError, match=r"^pair.source: its files changed since this command began"):
        run(
            "calibrate",
            tmp_path,
            *(option for option in toy_models((folders[0], folders[1])) if "solver" not in option),
        )
