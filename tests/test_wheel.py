"""What is installed is complete: the options travel in the wheel, and the console script is there."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPOSE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import kvxfer
from kvxfer.experiment.config import compose, config_directory
found = {stage: compose(stage, []).pair.name for stage in ("calibrate", "train", "evaluate")}
print(json.dumps({"package": kvxfer.__file__, "configs": str(config_directory()), "found": found}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but the package, installed from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder / "site")]
    for module in (build, [*install, "--find-links", str(folder), "kvxfer"]):
        line = [sys.executable, "-m", *module]
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_all_configs_compose_from_the_wheel(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPOSE, str(installed)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    told = json.loads(done.stdout)
    assert Path(told["package"]).is_relative_to(installed)
    assert Path(told["configs"]).is_relative_to(installed)
    assert told["found"] == dict.fromkeys(("calibrate", "train", "evaluate"), "toy")


def test_the_wheel_has_every_config_the_toy_models_and_what_healing_changed(installed):
    def names(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")}

    assert names(installed / "kvxfer" / "configs") == names(ROOT / "configs")
    folders = (ROOT / "kvxfer" / "toy" / "weights", ROOT / "kvxfer" / "models" / "healed")
    weights = {p.relative_to(ROOT).as_posix() for folder in folders for p in folder.rglob("*.*") if p.is_file()}
    assert all((installed / name).is_file() for name in weights)
    assert not any((installed / name).exists() for name in ("tests", "tools"))


def test_the_console_script_names_a_function_that_exists(installed):
    (file,) = installed.glob("kvxfer-*.dist-info/entry_points.txt")
    entries = configparser.ConfigParser()
    entries.read(file)
    scripts = dict(entries["console_scripts"])
    assert set(scripts) == {"kvxfer"}
    for target in scripts.values():
        module, function = target.split(":")
        source = (installed / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(" in source
