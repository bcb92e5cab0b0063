"""Which layers to leave out of a model, so that it makes a source for itself: those whose loss does least harm.

    python benchmarks/choose_layers.py pair=smollm2_mild corpus=pydoc --rows 8

The pair's target is read, whole. One of layers 0 and 1 goes first (else the first caches of source and target would be
equal by construction), then greedily those that cost the fewest nats on rows of the validation split, until at least
four are gone and the source is worse by ``--gap`` nats per token, or eight are gone.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.messages import set_up_logging
from kvxfer.models.hf.load import load_model
from kvxfer.text.corpus import load_rows

FEWEST, MOST = 4, 8


class Loss:
    """Nats per token of the model without some layers."""

    def __init__(self, lm: nn.Module, tokens: Int64[Tensor, "rows length"], batch: int) -> None:
        self.lm, self.tokens, self.batch = lm, tokens, batch
        self.layers = list(lm.base_model.layers)

    @torch.inference_mode()
    def __call__(self, dropped: set[int]) -> float:
        body = self.lm.base_model
        body.layers = nn.ModuleList(layer for index, layer in enumerate(self.layers) if index not in dropped)
        body.config.num_hidden_layers = len(body.layers)
        total = 0.0
        for ids in self.tokens.split(self.batch):
            logits = self.lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
            total += float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        return total / (self.tokens.shape[0] * (self.tokens.shape[1] - 1))


def say(what: str, loss: float, whole: float) -> None:
    print(f"{what}: {loss:.3f} nats, perplexity {math.exp(loss):.2f} ({loss - whole:+.3f})", flush=True)


def choose(loss: Loss, first: list[int], gap: float, shortlist: int) -> list[int]:
    """The layers to drop, in ascending order; every trial's loss is printed."""
    whole = loss(set())
    say("whole", whole, whole)
    alone = {}
    for layer in range(len(loss.layers)):
        alone[layer] = loss({layer})
        say(f"without {layer}", alone[layer], whole)
    start = min(first, key=alone.__getitem__)
    dropped, reached = {start}, alone[start]
    while len(dropped) < FEWEST or (reached - whole < gap and len(dropped) < MOST):
        candidates = sorted((layer for layer in alone if layer not in dropped), key=alone.__getitem__)[:shortlist]
        tried = {layer: loss(dropped | {layer}) for layer in candidates}
        best = min(tried, key=tried.__getitem__)
        dropped.add(best)
        reached = tried[best]
        say(f"without {', '.join(map(str, sorted(dropped)))}", reached, whole)
    return sorted(dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of calibrate.py: pair=..., corpus=...")
    parser.add_argument("--first", type=int, nargs="+", default=[0, 1], help="one of these layers is dropped first")
    parser.add_argument("--rows", type=int, default=8, help="rows of the validation split")
    parser.add_argument("--batch", type=int, default=8, help="rows per forward pass")
    parser.add_argument("--gap", type=float, default=0.3, help="nats per token by which the source should be worse")
    parser.add_argument("--shortlist", type=int, default=6, help="layers tried in each greedy step, by harm alone")
    args = parser.parse_args()
    set_up_logging()
    settings = to_settings("calibrate", compose("calibrate", args.overrides))
    pair = settings.pair
    started = time.monotonic()
    model = load_model(pair.target, pair.dtype, pair.device, pair.attention, "pair.target")
    rows = load_rows(settings.corpus, model.tokenizer, "validation", args.rows)
    chosen = choose(Loss(model.lm, rows.tokens.to(model.device), args.batch), args.first, args.gap, args.shortlist)
    print(f"pair.drop_layers=[{','.join(map(str, chosen))}]  ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
