"""Pairs whose source is the target without some layers: which source layer every target layer came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair


@dataclass(frozen=True)
class Ancestry:
    """``layers`` is, for each target layer, the source layer that is it, or the nearest survivor of a dropped one.

    Of two survivors that are equally near the earlier one counts. ``dropped`` are the target's layers that the source
    lacks. Both models compute the same in the layers before the first of them: those have equal caches.
    """

    layers: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def identical(self) -> int:
        """How many target layers have the source's own cache, by construction: all before the first dropped one."""
        return self.dropped[0]

    def copy(self, cache: KV) -> KV:
        """The source's cache, rotated or not, with one layer for each target layer."""
        return KV([cache.keys[i] for i in self.layers], [cache.values[i] for i in self.layers])

    def to_dict(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "dropped": list(self.dropped), "identical": self.identical}


def find_ancestry(pair: Pair) -> Ancestry | None:
    """The ancestry of a pair whose source was pruned from its target; None for any other pair."""
    source, target = pair.source, pair.target
    same_files = source.revision == target.revision and source.revision.startswith("sha256:")
    if not same_files and (source.name, source.revision) != (target.name, target.revision):
        return None
    whole = range(target.geometry.layers + len(target.dropped))
    ours = [layer for layer in whole if layer not in source.dropped]
    theirs = [layer for layer in whole if layer not in target.dropped]
    dropped = tuple(index for index, layer in enumerate(theirs) if layer not in ours)
    if not dropped or not set(ours) <= set(theirs):
        return None
    # min takes the first of several equally near ones.
    nearest = (min(range(len(ours)), key=lambda n: abs(ours[n] - layer)) for layer in theirs)
    return Ancestry(tuple(nearest), dropped)
