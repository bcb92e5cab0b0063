"""The names of conditions and designs: one word for one thing, as everywhere in the project."""

from __future__ import annotations

CONDITION_NAMES = {
    "ceiling": "Target, own prefill (ceiling)",
    "identity": "Target, own cache injected (identity)",
    "source": "Source alone (baseline)",
    "mapped": "Mapped cache",
    "mapped_all": "Mapped cache, all but the last token",
    "floor": "Zeroed cache (floor)",
    "raw_copy": "Raw copy of the source's cache",
    "ancestor_copy": "Copy of each layer's ancestor",
    "wrong_donor": "Another document's cache",
    "random_map": "Random map",
    "no_context": "No context",
}
# For a console of 80 columns: 20 characters at most.
SHORT_NAMES = CONDITION_NAMES | {
    "ceiling": "Target, own prefill",
    "identity": "Target, own cache",
    "source": "Source alone",
    "mapped_all": "Mapped, all but last",
    "floor": "Zeroed cache",
    "raw_copy": "Raw copy",
    "ancestor_copy": "Ancestors' copy",
    "wrong_donor": "Another doc's cache",
}
DESIGNS = {
    "same": "keys from keys, values from values (the paper's form)",
    "both": "keys and values, each from both",
    "previous": "both, of this token and of the one before",
    "embedding": "both, and the target's own embeddings of this token and of the two before",
    "layer0": "both, and the target's own first layer of this token",
    "relu": "both, and random ReLU features of all source layers",
    "products": "both, and random products of all source layers",
    "hidden": "both, and the source's final hidden state of this token",
    "rich": "both, of this token and of the one before, and the target's embeddings of this token and of two before",
}


def condition_name(condition: str, short: bool = False) -> str:
    """A condition's name for a reader; an unknown one with its underscores opened."""
    names = SHORT_NAMES if short else CONDITION_NAMES
    return names.get(condition) or condition.replace("_", " ").capitalize()
