"""Two tiny language models that look facts up in a story, with the world they were trained on.

The weights are embedded and frozen; `kvxfer.toy.recipe` made them and `tools.check_toy` measures them.
"""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).parent / "weights"
SOURCE_DIR = _WEIGHTS / "source"
TARGET_DIR = _WEIGHTS / "target"
# of each folder's model.safetensors
WEIGHTS_SHA256 = {
    "source": "2719e2db53219b58f9db62071181a0398d748cd6b8d842257452b644de17a274",
    "target": "b40f8eec283267a0a740b5b22f3543b969982bc7ebe445e696da9d42880867ff",
}
