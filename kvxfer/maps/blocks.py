"""What a map may read at a token: a design is a list of named blocks of feature columns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvxfer.errors import KvxferError

KINDS = ("keys", "values")

Output = tuple[int, str]
"""A target layer and the kind (keys or values) that is predicted."""

RANDOM = ("random_relu", "random_products")
"""Blocks of random features: functions of all calibrated source layers."""

EXTRAS = ("embedding", "layer0_keys", "layer0_values", *RANDOM, "source_hidden")
"""Blocks that are no source layer's keys or values: the target's embedding of the token, its own first layer's content
keys and values (a function of the token alone), random features of all source layers, and the source's final hidden
state."""


@dataclass(frozen=True, order=True)
class Block:
    """Feature columns of this token (offset 0) or of an earlier one (offset -1).

    All heads of one source layer's keys or values, or one of ``EXTRAS`` (whose layer is 0).
    """

    layer: int
    kind: str
    offset: int = 0

    @property
    def is_source(self) -> bool:
        """Whether a source layer gives the block."""
        return self.kind in KINDS

    @property
    def name(self) -> str:
        """The block's name in files: ``keys.3``, ``values.3@-1`` or ``embedding.0@-2``."""
        return f"{self.kind}.{self.layer}" + (f"@{self.offset}" if self.offset else "")

    @staticmethod
    def parse(name: str) -> Block:
        head, _, offset = name.partition("@")
        kind, _, layer = head.partition(".")
        if kind not in KINDS + EXTRAS or not layer.isdigit():
            raise KvxferError(f"{name!r} is no block name (expected e.g. keys.3 or values.3@-1)")
        return Block(int(layer), kind, int(offset or 0))


@dataclass(frozen=True)
class Features:
    """Which blocks of its source layers a target layer reads, and what else.

    Args:
        name: the option's name, with what was changed of it (``named``).
        kinds: ``same`` (keys from keys, values from values: arXiv 2608.03893) or ``both`` (each from both).
        previous: how many earlier tokens of the source are read too (0 or more).
        target_embedding: the target's embedding of this token and of so many earlier ones; None for none.
        target_layer0: the target's own first layer's content keys and values of this token.
        random_relu: how many random ReLU features of all calibrated source layers, both kinds, this token (0: none).
        random_products: how many random products of two projections of the same columns (0: none).
        source_hidden: the source's hidden state of this token after its last layer and final norm.
    """

    name: str
    kinds: str = "same"
    previous: int = 0
    target_embedding: int | None = None
    target_layer0: bool = False
    random_relu: int = 0
    random_products: int = 0
    source_hidden: bool = False

    def __post_init__(self) -> None:
        if self.kinds not in ("same", "both"):
            raise KvxferError(f"features.kinds={self.kinds!r} is neither 'same' nor 'both'")
        for key in ("previous", "target_embedding", *RANDOM):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise KvxferError(f"features.{key}={value} must be 0 or more")

    def blocks(self, kind: str, layers: Iterable[int]) -> tuple[Block, ...]:
        """The design of a target's keys or values over the given source layers, in column order."""
        kinds = KINDS if self.kinds == "both" else (kind,)
        source = tuple(
            Block(layer, k, -back) for layer in sorted(layers) for k in kinds for back in range(self.previous + 1)
        )
        return source + self.extras

    @property
    def extras(self) -> tuple[Block, ...]:
        """The blocks that every target layer reads whatever its source layers are."""
        found: list[Block] = []
        if self.target_embedding is not None:
            found += [Block(0, "embedding", -back) for back in range(self.target_embedding + 1)]
        if self.target_layer0:
            found += [Block(0, "layer0_keys"), Block(0, "layer0_values")]
        found += [Block(0, kind) for kind in (*RANDOM, "source_hidden") if getattr(self, kind)]
        return tuple(found)

    def covers(self, other: Features) -> bool:
        """Whether moments kept for this design also serve the other."""
        source = (self.kinds == "both" or other.kinds == "same") and self.previous >= other.previous
        # Random features of another number are other features.
        same_random = all(getattr(other, kind) in (0, getattr(self, kind)) for kind in RANDOM)
        return source and same_random and set(self.extras) >= set(other.extras)

    def joined(self, other: Features) -> Features:
        """A design whose moments serve both."""
        if other.covers(self):
            return other
        if self.covers(other):
            return self
        for kind in RANDOM:
            ours, theirs = getattr(self, kind), getattr(other, kind)
            if ours and theirs not in (0, ours):
                raise KvxferError(
                    f"features.{kind}={theirs} is not the {ours} of pair.features={self.name}: one pass keeps one "
                    "number of them; set another pair.features (e.g. both)"
                )
        embeddings = [f.target_embedding for f in (self, other) if f.target_embedding is not None]
        return Features(
            f"{self.name}+{other.name}",
            "both" if "both" in (self.kinds, other.kinds) else "same",
            max(self.previous, other.previous),
            max(embeddings) if embeddings else None,
            self.target_layer0 or other.target_layer0,
            max(self.random_relu, other.random_relu),
            max(self.random_products, other.random_products),
            self.source_hidden or other.source_hidden,
        )


DESIGNS = {
    "same": Features("same"),
    "both": Features("both", kinds="both"),
    "previous": Features("previous", kinds="both", previous=1),
    "embedding": Features("embedding", kinds="both", target_embedding=2),
    "layer0": Features("layer0", kinds="both", target_layer0=True),
    "relu": Features("relu", kinds="both", random_relu=1500),
    "products": Features("products", kinds="both", random_products=1500),
    "hidden": Features("hidden", kinds="both", source_hidden=True),
    "rich": Features("rich", kinds="both", previous=1, target_embedding=2),
}


def named(given: Features) -> Features:
    """A design under the name of the option that it equals, else of its option with what was changed of it.

    ``features=both features.previous=1`` is ``previous``, one question and one row; with 2 it is ``both previous=2``.
    """
    for option in DESIGNS.values():
        if replace(given, name=option.name) == option:
            return option
    usual = vars(DESIGNS.get(given.name, Features(given.name)))
    changed = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in vars(given).items()
        if value != usual[key]
    ]
    return replace(given, name=" ".join([given.name, *changed]))


DEMO = ("same", "both", "previous")
"""The designs that ``make demo`` compares."""
