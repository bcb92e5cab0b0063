"""The language model that lm-evaluation-harness sees. Import it inside functions only: the harness is an extra.

Texts become ids as the harness's own model for transformers does it, so that without a map both answer every request
alike. Scores and decoding are this project's (``harness``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.requests import Decoding, Handover, Tokens, cut, score_continuations, write_answers
from kvxfer.progress import progress

MOST_TOKENS = 256
"""Tokens of an answer where a task says nothing: the harness's own default."""

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Further settings of a task's generation_kwargs that change nothing when they have this value.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the harness's requests under one condition.

    Args:
        handover: the condition.
        batch_size: contexts per forward pass.
        seed: of answers that are sampled.
    """

    def __init__(self, handover: Handover, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.handover, self.batch_size, self.seed = handover, batch_size, seed
        self.tokenizer = handover.pair.tokenizer
        self.max_length = handover.pair.longest_context
        if self.prefix_token_id is None:
            raise KvxferError("eval=lm_eval: the pair's tokenizer has neither a BOS nor an EOS to begin a text with")

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """What stands before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids as the tokenizer gives them by default; a text that begins with BOS does not get another."""
        options: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, verbose=False, **options))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of every continuation, and whether it would have been decoded greedily."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        given = [cut(context, continuation, self.max_length) for _, context, continuation in requests]
        with progress(f"{self.handover.condition}: answers to choose from", len(given), "answers") as advance:
            return score_continuations(self.handover, given, self.batch_size, advance)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Refused: without a context there is nothing to hand over."""
        raise KvxferError(
            "eval.tasks: a task scores whole texts, which have no context to hand over; use eval=perplexity, which "
            "scores what follows a prefix"
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The text that is decoded after every context, up to a stop string of its task."""
        groups: dict[Decoding, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(decoding_of(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        with progress(f"{self.handover.condition}: free answers", len(requests), "answers") as advance:
            for decoding, members in groups.items():
                contexts = [self._context(requests[number].args[0], decoding) for number in members]
                # Written out in ordinary tokens, the end of a text ends an answer too.
                if self.eot_token_id is not None:
                    decoding = replace(decoding, until=(*decoding.until, self.tokenizer.decode(self.eot_token_id)))
                seeds = [f"{self.seed}/{number}" for number in members]
                texts = write_answers(self.handover, contexts, decoding, self.batch_size, seeds, advance)
                found |= zip(members, texts, strict=True)
        return [found[number] for number in range(len(requests))]

    def _context(self, text: str, decoding: Decoding) -> Tokens:
        """A context's ids, cut from the left so that the answer still fits."""
        room = self.max_length - decoding.most
        if room < 1:
            raise KvxferError(
                f"eval.tasks: a task asks for answers of {decoding.most} tokens (max_gen_toks) and this pair reads "
                f"{self.max_length} in all; lower the task's max_gen_toks or choose another pair"
            )
        return tuple(self.tok_encode(text)[-room:]) or (int(self.prefix_token_id or 0),)


def decoding_of(options: Mapping[str, Any]) -> Decoding:
    """A task's ``generation_kwargs``; what would change the answer and is not known here is refused."""
    rest = dict(options)
    until = rest.pop("until", None) or []
    limits = [rest.pop(key) for key in _LIMITS if rest.get(key) is not None]
    sampled, temperature = rest.pop("do_sample", None), float(rest.pop("temperature", None) or 0.0)
    if sampled and not temperature:
        temperature = 1.0
    top_k, top_p = int(rest.pop("top_k", None) or 0), float(rest.pop("top_p", None) or 1.0)
    for key, value in rest.items():
        if value is not None and _NEUTRAL.get(key) != value:
            raise KvxferError(
                f"eval.tasks: a task decodes with {key}={value}, which is not supported; known are until, do_sample, "
                f"temperature, top_k, top_p and {', '.join(_LIMITS)}"
            )
    return Decoding(
        most=int(limits[0]) if limits else MOST_TOKENS,
        until=tuple(term for term in ([until] if isinstance(until, str) else until) if term),
        temperature=0.0 if sampled is False else temperature,
        top_k=top_k,
        top_p=top_p,
    )
