"""A model's greedy answer, as text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from kvxfer.models.hf.model import LoadedModel, Running

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def spoken(
    model: LoadedModel, running: Running, rest: Int[Tensor, "1 tokens"], most: int, new: list[int]
) -> Iterator[str]:
    """The pieces of an answer of at most so many tokens; ends before a token that ends texts.

    Args:
        running: the model after all of the text but ``rest``; its cache grows.
        rest: what it reads next, one token or more.
        new: where the tokens of the answer are put, as they come.
    """
    said, ends = "", model.end_tokens
    while len(new) < most:
        token = int(model.next_token(running, rest)[0])
        if token in ends:
            break
        new.append(token)
        rest = rest.new_tensor([[token]])
        text = model.tokenizer.decode(new)
        # A character whose bytes are not all there yet waits for the next token.
        if text != said and not text.endswith(_INCOMPLETE):
            yield text[len(said) :]
            said = text
    text = model.tokenizer.decode(new)
    if text != said:
        yield text[len(said) :]
