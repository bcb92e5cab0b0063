"""Whatever edit of a model's folder changes a number changes its identity: tried on every file, at random places."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvxfer.errors import KvxferError
from kvxfer.models.files import folder_digest
from kvxfer.models.hf.load import load_model
from kvxfer.models.spec import ModelSpec
from tests.doubles import make_double

EDITS = 2
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
UNREAD = {"README.md": "# A model of 3 layers", ".gitattributes": "*.bin lfs", "training_args.bin": "0123456789"}


def answers(folder: Path) -> str:
    """All that a model gives: logits, ids of a text, where an answer ends, what a conversation looks like."""
    try:
        model = load_model(ModelSpec(str(folder)), "float32", "cpu", "sdpa")
        talk = model.tokenizer.apply_chat_template([{"role": "user", "content": "who"}], tokenize=False)
    except KvxferError as error:
        return str(error)
    ids = model.tokenizer.encode("the key is in the kitchen and anna has 10 boxes")
    logits = model.logits(torch.tensor([ids]))
    content = [logits.numpy().tobytes(), repr([ids, sorted(model.end_tokens), talk]).encode()]
    return hashlib.sha256(b"".join(content)).hexdigest()


def edit(path: Path, rng: random.Random) -> None:
    """Another character of the same kind at a random place, in place; the file's size and time stay what they were."""
    before, content = path.stat(), bytearray(path.read_bytes())
    first = 0
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            assert file.keys()
        first = 8 + int.from_bytes(content[:8], "little")  # past the header: weights alone
    place = rng.randrange(first, len(content))
    kinds = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    kind = next((kind for kind in kinds if content[place] in kind), bytes(range(256)))
    content[place] = rng.choice([byte for byte in kind if byte != content[place]])
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(scope="module")
def folders(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two pairs with all that a folder may hold: one of a single file of weights, one of shards behind an index."""
    home = tmp_path_factory.mktemp("folders")
    pairs = {"toy": tiny_folders, "sharded": make_double("qwen2.5_1.5b_3b", home / "made")}
    found = {}
    for name, pair in pairs.items():
        copies = []
        for side, folder in zip(("source", "target"), pair, strict=True):
            copy = shutil.copytree(folder, home / name / side)
            if name == "sharded":
                model = load_model(ModelSpec(str(folder)), "float32", "cpu", "sdpa")
                (copy / "model.safetensors").unlink()
                model.lm.save_pretrained(copy, max_shard_size="100KB")
                assert (copy / "model.safetensors.index.json").is_file()
            (copy / "chat_template.jinja").write_text(TEMPLATE)
            for file, text in UNREAD.items():
                (copy / file).write_text(text)
            copies.append(copy)
        found[name] = (copies[0], copies[1])
    return found


@pytest.mark.parametrize("side", [0, 1], ids=["source", "target"])
@pytest.mark.parametrize("pair", ["toy", "sharded"])
def test_every_edit_that_changes_a_number_changes_the_identity(
    pair: str, side: int, folders: dict[str, tuple[Path, Path]]
) -> None:
    folder, rng = folders[pair][side], random.Random(side)
    given, whole = answers(folder), folder_digest(folder, "pair.source")
    names = {path.name for path in folder.iterdir()}
    if pair == "sharded":  # the other files are as in the other pair
        names -= {path.name for path in folders["toy"][0].iterdir()}
    assert any(name.endswith(".safetensors") for name in names)
    unseen = []
    for path in (folder / name for name in sorted(names)):
        content = path.read_bytes()
        for _ in range(EDITS):
            edit(path, rng)
            if folder_digest(folder, "pair.source") == whole:
                unseen.append(path.name)
        if path.name in unseen:
            assert answers(folder) == given, f"an edit of {path.name} changes what is answered and not the identity"
        path.write_bytes(content)
    assert sorted(unseen) == sorted([*(UNREAD if pair == "toy" else ())] * EDITS)
    assert folder_digest(folder, "pair.source") == whole
