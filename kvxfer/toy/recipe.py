"""Makes the two toy models from nothing: ``python -m kvxfer.toy.recipe [--model source|target|both] [--out DIR]``.

What makes in-context look-up form in models this small, within minutes: at first half of each batch is random words
over and over; facts stand next to their keys; matrices are trained with Muon; attention starts sharp; the loss is
mainly on answers. Short rows come first, for they form the skill; longer ones follow, so that it holds over distance.

Two hops do not form by themselves in this time, so the target is grown. Its lower half is trained alone first, and
names the owner where a two-hop question asks for the owner's place. Stacked on itself (Gong et al. 2019), it reads that
name as if it had been asked for: the second copy answers the second hop within a hundred steps. For as long as the
halves grow together, the lower one must go on naming the owner. No weight serves this alone: it is a plain model.

A run is deterministic on one machine. Another processor, another version of torch or another number of threads gives
other bits, and so slightly different models: the committed weights are the reference.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from kvxfer.toy.tokenizer import build_tokenizer
from kvxfer.toy.world import BOS, EOS, KINDS, PAD, TRAINING_SEEDS_FROM, VOCABULARY, make_marked_row

TRAINED = (*KINDS, "repeat")  # what accuracy is reported on
WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}
SPECIAL_WORDS = 4  # the first words of the vocabulary, which random sequences leave out
ANSWER_WEIGHT, TWO_HOP_WEIGHT, OTHER_WEIGHT, REPEAT_WEIGHT = 1.0, 1.5, 0.03, 0.5
THREADS = 1  # models this small hardly gain from a second one where the processor is shared
LOOKS_UP_FROM = 0.9  # the share of repeated words right from which look-up counts as formed
HEAD_DIM, KV_HEADS = 32, 2
ADAMW_RATE, MUON_RATE = 3e-3, 1.5e-2
NAMING_WEIGHT = 0.3
WARM_UP_STEPS = 30
PLAIN_ATTENTION_TOKENS = 128
REPORT_EVERY = 50


@dataclass(frozen=True)
class Bucket:
    """One shape of batch: this many rows of this many tokens, each with so many turns (drawn if None)."""

    tokens: int
    rows: int
    turns: int | None = None


FIRST = Bucket(96, 56, 8)  # half of it random words repeated, until the model looks words up
SHORT = (Bucket(64, 72, 8), Bucket(96, 48, 8))
LONGER = (Bucket(128, 32), Bucket(256, 16), Bucket(512, 8))


@dataclass(frozen=True)
class Batch:
    """Token ids, the weight of each in the loss, and the kind of question it answers (an index in TRAINED, or -1)."""

    ids: Int[Tensor, "rows tokens"]
    weights: Float[Tensor, "rows tokens"]
    kinds: Int[Tensor, "rows tokens"]
    owners: Int[Tensor, "rows tokens"]  # at the last word of a two-hop prompt: who has the thing asked about; else -1


def draw_batch(seed: int, step: int, buckets: Sequence[Bucket], repeats: bool) -> Batch:
    """The batch of this step, in one of these shapes; with `repeats`, half of it is random words repeated."""
    rng = random.Random(seed * 2**32 + step)
    bucket = rng.choice(buckets) if len(buckets) > 1 else buckets[0]
    repeated_rows = bucket.rows // 2 if repeats else 0
    first_seed = TRAINING_SEEDS_FROM + (seed * 2**20 + step) * 2**12
    rows = [make_marked_row(first_seed + i, bucket.tokens, bucket.turns) for i in range(bucket.rows - repeated_rows)]
    ids = torch.tensor([[WORD_ID[word] for word in words] for words, _ in rows])
    kinds = torch.tensor([marks for _, marks in rows])
    owners = torch.tensor([_owners(words, marks) for words, marks in rows])
    weights = torch.where(kinds >= 0, ANSWER_WEIGHT, OTHER_WEIGHT)
    weights[kinds == KINDS.index("two_hop")] = TWO_HOP_WEIGHT
    if not repeats:
        return Batch(ids, weights, kinds, owners)
    repeated, again = _repeated_words(rng, repeated_rows, bucket.tokens)
    return Batch(
        torch.cat([ids, repeated]),
        torch.cat([weights, again * REPEAT_WEIGHT]),
        torch.cat([kinds, torch.where(again, TRAINED.index("repeat"), -1)]),
        torch.cat([owners, torch.full_like(repeated, -1)]),
    )


def _owners(words: list[str], marks: list[int]) -> list[int]:
    """For the last word of each two-hop prompt the id of the person in between, -1 elsewhere."""
    owner = {key: name for verb, key, name in zip(words, words[1:], words[2:], strict=False) if verb == "who"}
    asked = [mark == KINDS.index("two_hop") for mark in [*marks[1:], -1]]
    return [WORD_ID[owner[word]] if two_hop else -1 for word, two_hop in zip(words, asked, strict=True)]


def _repeated_words(
    rng: random.Random, rows: int, tokens: int
) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    """Random words over and over, and which of them can be known from an earlier round.

    Every row has its own period: with a common one, attention to a fixed distance would do, and no look-up would form.
    """
    ids = torch.full((rows, tokens), WORD_ID[BOS])
    again = torch.zeros(rows, tokens, dtype=torch.bool)
    for row in range(rows):
        period = rng.randint(tokens // 5, tokens // 2)
        words = rng.choices(range(SPECIAL_WORDS, len(VOCABULARY)), k=period)
        ids[row, 1:] = torch.tensor([words[i % period] for i in range(tokens - 1)])
        again[row, period + 2 :] = True
    return ids, again


@dataclass(frozen=True)
class Stage:
    """So many steps with fresh optimizers: short batches at first, then batches of all lengths.

    The stage trains a model of so many `layers`, made of copies of the stage's before. With `answers_owner` a two-hop
    question is answered by who owns the thing; with a `hop_layer`, what leaves that layer must name the owner too.
    """

    layers: int
    steps: int
    short_steps: int
    decay_share: float = 0.3  # of the steps, the last ones, in which the learning rates fall to zero
    answers_owner: bool = False
    hop_layer: int | None = None


@dataclass(frozen=True)
class Recipe:
    """One model and how it is trained."""

    seed: int
    width: int
    feed_forward: int
    heads: int
    rope_theta: float
    stages: tuple[Stage, ...]
    first: Bucket = FIRST
    short: tuple[Bucket, ...] = SHORT
    mixed: tuple[Bucket, ...] = SHORT + LONGER


RECIPES = {
    "source": Recipe(
        seed=1,
        width=96,
        feed_forward=288,
        heads=4,
        rope_theta=10_000.0,
        stages=(Stage(layers=3, steps=1000, short_steps=600),),
    ),
    "target": Recipe(
        seed=2,
        width=192,
        feed_forward=512,
        heads=6,
        rope_theta=100_000.0,
        stages=(
            Stage(layers=3, steps=700, short_steps=700, decay_share=0.0, answers_owner=True),
            Stage(layers=6, steps=600, short_steps=250, decay_share=0.4, hop_layer=3),
        ),
    ),
}


def build_model(recipe: Recipe, layers: int) -> Qwen3ForCausalLM:
    """An untrained model of so many layers, drawn from torch's random state."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.width,
        num_hidden_layers=layers,
        intermediate_size=recipe.feed_forward,
        num_attention_heads=recipe.heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=WORD_ID[BOS],
        eos_token_id=WORD_ID[EOS],
        pad_token_id=WORD_ID[PAD],
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:  # attention that is sharp from the start finds look-ups sooner
        layer.self_attn.q_norm.weight.data.fill_(2.0)
        layer.self_attn.k_norm.weight.data.fill_(2.0)
    return model


def _optimizers(model: Qwen3ForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices, AdamW for the embedding and the gains; each with its peak learning rate."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        (torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01), MUON_RATE),
        (torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0), ADAMW_RATE),
    ]


Report = Callable[[int, str], None]
"""Told after a step: its number, the loss and the share of answer tokens right per kind, both running averages."""


def train(recipe: Recipe, report: Report) -> Qwen3ForCausalLM:
    torch.use_deterministic_algorithms(True)
    # nothing reads it, and filling takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(THREADS)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, recipe.stages[0].layers).train()
    right = dict.fromkeys(TRAINED, 0.0)
    done = 0
    for stage in recipe.stages:
        if done:
            model = stack(model, recipe, stage.layers)
            right["two_hop"] = 0.0  # it is asked for something else from here on
        train_stage(model, recipe, stage, done, right, report)
        done += stage.steps
    return model.eval()


def stack(model: Qwen3ForCausalLM, recipe: Recipe, layers: int) -> Qwen3ForCausalLM:
    """A deeper model whose layers are the given one's, over and over; embedding and last norm stay."""
    deeper = build_model(recipe, layers).train()
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    lower = model.model.layers
    for index, layer in enumerate(deeper.model.layers):
        layer.load_state_dict(lower[index % len(lower)].state_dict())
    return deeper


def train_stage(
    model: Qwen3ForCausalLM, recipe: Recipe, stage: Stage, done: int, right: dict[str, float], report: Report
) -> None:
    """One stage, after so many steps of earlier ones; `right`, the accuracies so far, is kept up to date."""
    optimizers = _optimizers(model)
    loss_average = 0.0
    for step in range(stage.steps):
        scale = min(1.0, (step + 1) / WARM_UP_STEPS)
        if stage.decay_share:
            scale *= min(1.0, (1 - step / stage.steps) / stage.decay_share)
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.zero_grad()
        looks_up = right["repeat"] >= LOOKS_UP_FROM
        later = recipe.short if step < stage.short_steps else recipe.mixed
        batch = draw_batch(recipe.seed, done + step, later if looks_up else (recipe.first,), repeats=not looks_up)
        loss, hits = _loss(model, batch, stage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        share = 1 / min(done + step + 1, 20)
        loss_average += (loss.item() - loss_average) / min(step + 1, 20)
        for index, kind in enumerate(TRAINED):
            of_kind = hits[batch.kinds[:, 1:] == index]
            if len(of_kind):
                right[kind] += (of_kind.float().mean().item() - right[kind]) * share
        shares = " ".join(f"{kind} {value:.2f}" for kind, value in right.items())
        report(done + step + 1, f"loss {loss_average:.3f}  {shares}")


def _loss(
    model: Qwen3ForCausalLM, batch: Batch, stage: Stage
) -> tuple[Float[Tensor, ""], Bool[Tensor, "rows predicted"]]:
    """The weighted loss of predicting each next word, and which predictions were right."""
    # on short rows the fused attention's backward pass takes several times as long as the plain one's
    model.set_attn_implementation("eager" if batch.ids.shape[1] <= PLAIN_ATTENTION_TOKENS else "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch.ids[:, :-1], use_cache=False, output_hidden_states=stage.hop_layer is not None)
    owners, weights = batch.owners[:, :-1], batch.weights[:, 1:]
    wanted = batch.ids[:, 1:]
    if stage.answers_owner:
        wanted = torch.where(owners >= 0, owners, wanted)
    losses = cross_entropy(output.logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    if stage.hop_layer is not None:
        named = model.lm_head(model.model.norm(output.hidden_states[stage.hop_layer][owners >= 0]))
        loss = loss + NAMING_WEIGHT * cross_entropy(named, owners[owners >= 0])
    return loss, output.logits.argmax(-1) == wanted


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face model folder, tokenizer included: stored in half precision, to be loaded in single."""
    copy.deepcopy(model).to(torch.float16).save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def train_with_progress(name: str, recipe: Recipe, console: Console) -> Qwen3ForCausalLM:
    """Train one model under a progress bar, or with a line now and then where the output is no terminal."""
    shown = console.is_terminal
    steps = sum(stage.steps for stage in recipe.stages)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[report]}"), console=console, disable=not shown) as bar:
        task = bar.add_task(name, total=steps, report="")
        start = time.monotonic()

        def report(step: int, stands: str) -> None:
            bar.update(task, completed=step, report=stands)
            if not shown and (step % REPORT_EVERY == 0 or step == steps):
                left = (time.monotonic() - start) / step * (steps - step)
                console.print(f"{name} {step}/{steps}  {stands}  {left / 60:.1f} min left", soft_wrap=True)

        return train(recipe, report)


def main() -> None:
    """Remake one model or both and save each in a folder of its name."""
    parser = argparse.ArgumentParser(prog="python -m kvxfer.toy.recipe", description="Remake the toy models.")
    parser.add_argument("--model", choices=[*RECIPES, "both"], default="both", help="which of the two (both)")
    parser.add_argument("--out", type=Path, default=Path("build/toy"), help="where to save them (build/toy)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()  # it would break into ours
    console = Console()
    for name in RECIPES if arguments.model == "both" else [arguments.model]:
        model = train_with_progress(name, RECIPES[name], console)
        save(model, arguments.out / name)
        console.print(f"saved {arguments.out / name}")


if __name__ == "__main__":
    main()
