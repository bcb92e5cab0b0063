"""The embedded weights: frozen, small, and up to their bar."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvxfer.toy import SOURCE_DIR, TARGET_DIR
from kvxfer.toy.recipe import RECIPES
from tools.check_toy import FULL, SHORT, measure, shortcomings

FOLDERS = {"source": SOURCE_DIR, "target": TARGET_DIR}
FROZEN = {
    "source": "2719e2db53219b58f9db62071181a0398d748cd6b8d842257452b644de17a274",
    "target": "b40f8eec283267a0a740b5b22f3543b969982bc7ebe445e696da9d42880867ff",
}
"""SHA-256 of each folder's model.safetensors."""


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_the_frozen_ones(name: str) -> None:
    data = (FOLDERS[name] / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == FROZEN[name]


def test_weights_are_small() -> None:
    sizes = [path.stat().st_size for folder in FOLDERS.values() for path in folder.rglob("*") if path.is_file()]
    assert sum(sizes) <= 10_000_000


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_a_plain_model_folder(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDERS[name], local_files_only=True)
    recipe = RECIPES[name]
    assert model.dtype == torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (recipe.stages[-1].layers, recipe.width)
    assert (model.config.num_key_value_heads, model.config.head_dim) == (2, 32)
    assert model.config.rope_parameters["rope_theta"] == recipe.rope_theta


@pytest.mark.parametrize(("length", "count"), [(SHORT, 80), (FULL, 30)])
def test_models_meet_the_bar(length: str, count: int) -> None:
    lines = measure(FOLDERS, count, [length])
    # so few questions without the story lie further from guessing than a thousand; check.py looks at those
    assert shortcomings([line for line in lines if line.with_story]) == []


def test_importing_the_package_is_light() -> None:
    code = "import sys, kvxfer.toy; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
