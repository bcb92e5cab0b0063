"""What a server imports: the handoff library, and nothing of the experiment framework."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("hydra", "omegaconf", "lightning", "wandb", "datasets", "matplotlib", "torchmetrics", "prometheus_client")


def test_importing_the_handoff_library_imports_no_framework() -> None:
    found = "import sys, kvxfer; kvxfer.Handoff, kvxfer.Policy; import kvxfer.handoff.conversation; print(*sys.modules)"
    modules = set(
        subprocess.run([sys.executable, "-c", found], check=True, capture_output=True, text=True).stdout.split()
    )
    assert "kvxfer.handoff.serving" in modules
    assert not modules & set(HEAVY)
