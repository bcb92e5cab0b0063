"""Pairs whose source was made of the target by leaving out layers: which source layer every target layer came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.models.files import PACKAGED, healed_file
from kvxfer.models.hf.changes import read_changes
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair


@dataclass(frozen=True)
class Ancestry:
    """``layers`` is, for each target layer, the source layer that is it, or the nearest survivor of a dropped one.

    Of two survivors that are equally near the earlier one counts. ``dropped`` are the target's layers that the source
    lacks. Both models compute the same in the layers before the first of them, and have equal caches there, unless the
    others were ``healed``: trained to make up for the loss.
    """

    layers: tuple[int, ...]
    dropped: tuple[int, ...]
    healed: bool = False

    @property
    def identical(self) -> int:
        """How many target layers have the source's own cache, by construction."""
        return 0 if self.healed else self.dropped[0]

    def copy(self, cache: KV) -> KV:
        """The source's cache, rotated or not, with one layer for each target layer."""
        return KV([cache.keys[i] for i in self.layers], [cache.values[i] for i in self.layers])

    def to_dict(self) -> dict[str, Any]:
        found = {"layers": list(self.layers), "dropped": list(self.dropped), "identical": self.identical}
        return found | {"healed": self.healed}


def find_ancestry(pair: Pair) -> Ancestry | None:
    """The ancestry of a pair whose source was pruned from its target; None for any other pair."""
    source, target = pair.source, pair.target
    healed = _healed(source, target)
    if healed is not None:
        return _ancestry(target.geometry.layers, healed, (), healed=True)
    same_files = source.revision == target.revision and source.revision.startswith("sha256:")
    if not same_files and (source.name, source.revision) != (target.name, target.revision):
        return None
    return _ancestry(target.geometry.layers + len(target.dropped), source.dropped, target.dropped)


def _healed(source: LoadedModel, target: LoadedModel) -> tuple[int, ...] | None:
    """The layers that a healed source lacks of this target, if it was made of it."""
    about = PACKAGED.get(source.name)
    if about is None or about.whole != target.name or source.dropped or target.dropped:
        return None
    file = healed_file(source.name)
    assert file is not None
    return read_changes(file, "pair").dropped


def _ancestry(
    layers: int, from_source: tuple[int, ...], from_target: tuple[int, ...], healed: bool = False
) -> Ancestry | None:
    """The ancestry of two models that lack these of one whole model's layers; None where that is no pruning."""
    whole = range(layers)
    ours = [layer for layer in whole if layer not in from_source]
    theirs = [layer for layer in whole if layer not in from_target]
    dropped = tuple(index for index, layer in enumerate(theirs) if layer not in ours)
    if not dropped or not set(ours) <= set(theirs):
        return None
    # min takes the first of several equally near ones.
    nearest = (min(range(len(ours)), key=lambda n: abs(ours[n] - layer)) for layer in theirs)
    return Ancestry(tuple(nearest), dropped, healed)
