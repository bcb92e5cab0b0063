"""Two tiny language models that look facts up in a story, with the world they were trained on.

The weights are embedded and frozen; `kvxfer.toy.recipe` made them and `tools.check_toy` measures them.
"""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).parent / "weights"
SOURCE_DIR = _WEIGHTS / "source"
TARGET_DIR = _WEIGHTS / "target"
