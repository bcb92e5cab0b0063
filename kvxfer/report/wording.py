"""The words of reports: names, introduction, glossary. One word for one thing, as everywhere in the project."""

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
INTRODUCTION = (
    "Two models of one family read the same text. The small one (the source) has already run; the large one (the"
    " target) goes on from the source's KV cache, translated by a map, and does not read the text itself. This report"
    " says how much of the target's ability survives, and whether the result beats the source, already paid for."
)
GLOSSARY = (
    ("Ceiling", "the target on its own prefill: the best that a map can reach."),
    (
        "Identity",
        "the target's own cache, injected the way a mapped one is: equals the ceiling if the plumbing is right.",
    ),
    ("Source alone", "the small model answers by itself: the baseline to beat."),
    (
        "Mapped cache",
        "the target on the mapped cache under the run's plan, which may let it compute a few tokens itself.",
    ),
    ("All but the last token", "the same with every token mapped except the last, which the target always computes."),
    (
        "Controls",
        "zeroed cache (floor), raw copy, another document's cache, random map, no context: should be near chance.",
    ),
    (
        "Copy of each layer's ancestor",
        "only where the source is the target without some layers: every target layer takes the cache of the source"
        " layer that is it, a dropped one that of its nearest survivor. It needs no map, so a map must beat it.",
    ),
    (
        "Retention",
        "accuracy ÷ the ceiling's. Floor-normalised: what lies above chance ÷ what lies above it at the ceiling.",
    ),
    (
        "Gap recovered",
        "(mapped \N{MINUS SIGN} source) ÷ (ceiling \N{MINUS SIGN} source):"
        " above 0 % the transfer beats the source; 100 % is the target.",
    ),
    (
        "Nats per token",
        "mean negative log-likelihood of the scored tokens; perplexity is its exponential. Lower is better.",
    ),
    (
        "Intervals and tests",
        "95 %. Whole documents are resampled (accuracy: Wilson's interval where wider). McNemar's exact test is over"
        " items, the paired t-test over documents. A difference counts when p < 0.05 and its interval excludes zero.",
    ),
)


def condition_name(condition: str, short: bool = False) -> str:
    """A condition's name for a reader; an unknown one with its underscores opened."""
    names = SHORT_NAMES if short else CONDITION_NAMES
    return names.get(condition) or condition.replace("_", " ").capitalize()
