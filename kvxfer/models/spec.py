"""Which two models, and how they are run, as settings (``kvxfer.text.spec`` says what a field's metadata may)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, files_of
from kvxfer.models.files import PACKAGED, folder_digest, packaged_digest
from kvxfer.models.hub import commit

EMBEDDED = ("toy-source", "toy-target")
"""Names of the models that come with this project."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model: a hub id, a local folder or a package that holds one; for a hub id its branch, tag or commit.

    ``drop_layers`` are layers that it is run without, counted in the whole model.
    """

    model: str
    revision: str = "main"
    drop_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "drop_layers", tuple(sorted(set(self.drop_layers))))

    @property
    def folder(self) -> Path | None:
        """The local folder, or None for a hub id."""
        path = Path(self.model).expanduser()
        return path if path.is_dir() else None

    @property
    def on_hub(self) -> bool:
        """Whether its files come from the hub, or from its cache."""
        return self.folder is None and self.model not in (*PACKAGED, *EMBEDDED)

    def pinned(self, key: str) -> ModelSpec:
        """The same at a commit, if it is a hub's: what a branch moves to later is not this model.

        Raises KvxferError, with ``key`` for the side of the pair, for a model or revision that can't be had.
        """
        check_exists(self, key)
        return replace(self, revision=commit(self.model, self.revision, key)) if self.on_hub else self


def check_exists(spec: ModelSpec, key: str) -> None:
    """Refuse a path that is no saved model before anything takes it for a hub id; ``key`` names the setting."""
    if spec.model in ("", "???"):
        raise KvxferError(f"{key}.model is not set; give a hub id or the folder of a saved model")
    looks_local = spec.model.startswith(("/", "./", "../", "~")) or spec.model.count("/") > 1
    if spec.model in (*PACKAGED, *EMBEDDED):
        return
    with files_of(f"{key}.model", Path(spec.model).expanduser()):
        folder = spec.folder
        saved = folder is not None and (folder / "config.json").is_file()
    if folder is None and looks_local:
        raise KvxferError(f"{key}.model: no folder {spec.model!r}; give a hub id or the folder of a saved model")
    if folder is not None and not saved:
        raise KvxferError(f"{key}.model: folder {spec.model!r} has no config.json; give the folder of a saved model")


def content_digest(spec: ModelSpec, key: str, verify: bool = False) -> str | None:
    """SHA-256 of a local or packaged model's files, or None for a hub id; ``key`` names the setting in errors.

    With ``verify`` all files are read again, though they seem to be what they were when they were read before.
    """
    check_exists(spec, key)
    if spec.model in PACKAGED:
        return packaged_digest(spec.model, key, verify)
    return None if spec.folder is None else folder_digest(spec.folder, key, verify)


def _what(place: int) -> dict[str, Any]:
    """Of a model, which decides by what it is and not by where it lies."""
    return {"id": lambda pair: pair.what(place)}


@dataclass(frozen=True)
class PairSpec:
    """Which two models, and how they are run; the fields are the keys of ``configs/pair/*.yaml``.

    Attributes:
        reverse: swap source and target.
        random_weights: the models are names of published shapes, made on the spot.
        layers: of random weights, how many layers of each are made (of the source at least ``k``); None for all.
        drop_layers: those of the source, unless it names its own.
        k: how many source layers a target layer reads unless the solver says otherwise.
        features: what calibration keeps, and a map reads, unless they say otherwise.
    """

    name: str = field(metadata={"id": False})
    source: ModelSpec = field(metadata=_what(0))
    target: ModelSpec = field(metadata=_what(1))
    dtype: str = "bfloat16"
    device: str = field(default="auto", metadata={"id": False})
    attention: str = "sdpa"
    reverse: bool = False
    random_weights: bool = False
    # These four decide as a part of the models, the solver and the calibration.
    layers: int | None = field(default=None, metadata={"id": False})
    drop_layers: tuple[int, ...] = field(default=(), metadata={"id": False})
    k: int = field(default=4, metadata={"id": False})
    features: str = field(default="same", metadata={"id": False})

    def __post_init__(self) -> None:
        if self.layers is None:
            return
        if not self.random_weights:
            raise KvxferError(
                f"pair.layers={self.layers} times a slice of random weights (pair=geometry); with pair={self.name} "
                "leave it out"
            )
        if self.layers < 1:
            raise KvxferError(f"pair.layers={self.layers} must be 1 or more, or null for all layers")

    def oriented(self) -> tuple[ModelSpec, ModelSpec]:
        """Source and target after ``reverse``, with the embedded models' folders in place of their names."""
        source, target = _embedded(self.source), _embedded(self.target)
        return (target, source) if self.reverse else (source, target)

    @property
    def slices(self) -> tuple[int | None, int | None]:
        """Layers that are made of source and target: the source has at least the k that a target layer reads."""
        return (None, None) if self.layers is None else (max(self.layers, self.k), self.layers)

    @property
    def label(self) -> str:
        """The pair's name, with ``_reversed`` after it when it is; of random weights both shapes' names."""
        name = f"{self.source.model}_{self.target.model}" if self.random_weights else self.name
        return f"{name}_reversed" if self.reverse else name

    @property
    def config_keys(self) -> tuple[str, str]:
        """The config keys that source and target come from, for messages."""
        return ("pair.target", "pair.source") if self.reverse else ("pair.source", "pair.target")

    def what(self, place: int) -> dict[str, Any]:
        """What the source (0) or the target (1) is: a hub's name and commit, its files' content, or its shape.

        A hub's revision is taken as it is: ``kvxfer.experiment.pins`` puts the commit in its place.
        """
        model = self.oriented()[place]
        if self.random_weights:
            return {"model": model.model, "layers": self.slices[place]}
        digest = content_digest(model, self.config_keys[place])
        named = {"model": model.model, "revision": model.revision} if digest is None else {"sha256": digest}
        return {**named, "drop_layers": list(model.drop_layers)}


def _embedded(spec: ModelSpec) -> ModelSpec:
    """The folder of a model that ships with this project; any other spec as it is."""
    if spec.model not in EMBEDDED:
        return spec
    from kvxfer import toy

    return replace(spec, model=str({"toy-source": toy.SOURCE_DIR, "toy-target": toy.TARGET_DIR}[spec.model]))
