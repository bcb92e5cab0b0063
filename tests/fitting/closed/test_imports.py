"""Solvers know moments and no models."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, sys
import kvxfer.fitting.closed
print(json.dumps(sorted(sys.modules)))
"""


def test_solvers_import_no_models() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    loaded = json.loads(found)
    heavy = ("transformers", "lightning", "omegaconf", "hydra")
    own = (
        "kvxfer.models.hf",
        "kvxfer.models.pair",
        "kvxfer.toy",
        "kvxfer.fitting.trained",
        "kvxfer.experiment.stages",
        "kvxfer.experiment.config",
    )
    assert [name for name in loaded if any(name == each or name.startswith(f"{each}.") for each in heavy + own)] == []
    assert "kvxfer.fitting.closed.ridge" in loaded
