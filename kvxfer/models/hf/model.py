"""A loaded language model as this project sees it: ids and KV in, KV, logits, tokens and queries out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import DynamicCache

from kvxfer.errors import KvxferError
from kvxfer.models.geometry import Geometry
from kvxfer.models.hf.cache import build_cache, cache_keyword, read_cache
from kvxfer.models.hf.observing import (
    TRAINED_INSTEAD,
    Followed,
    Observed,
    attentions,
    captured_outputs,
    captured_queries,
    layers_of,
    output_projections,
)
from kvxfer.models.hf.rotary import cos_sin, find_rotary
from kvxfer.models.kv import KV, LayerTensors

Ids = Int[Tensor, "batch tokens"]

WITHOUT_QUERIES = "calibration.metrics=false, calibration.weights=none and calibration.probe_rows=0"
SOFTMAX_TOKENS = 32
SOFTMAX_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Share of an attention's output that rounding may change."""


@dataclass(frozen=True)
class Running:
    """A model in the middle of a text: the library's own cache, which grows, and final hidden states if asked for."""

    cache: DynamicCache
    hidden: Float[Tensor, "batch tokens hidden"] | None = None


class LoadedModel:
    """A causal language model in eval mode with an explicit cache: every method takes and returns plain tensors.

    Caches hold rotated keys and all tokens of all layers. What a method returns is made in inference mode (but for
    ``follow`` and ``project``): clone it before autograd may see it. ``name`` is the model as the user wrote it,
    ``revision`` what it resolved to, ``remarks`` what the library warned of while it was loaded, ``dropped`` the layers
    of the whole model that it is run without, and ``whole`` the geometry of the model that it is a slice of (its own
    unless given).
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        geometry: Geometry,
        name: str,
        revision: str,
        dropped: tuple[int, ...] = (),
        whole: Geometry | None = None,
    ) -> None:
        self.lm: Any = lm.eval().requires_grad_(False)
        self.body: Any = lm.base_model
        self.tokenizer = tokenizer
        self.geometry = geometry
        self.name = name
        self.revision = revision
        self.dropped = dropped
        self.whole = whole or geometry
        self.remarks: tuple[str, ...] = ()
        self.dtype: torch.dtype = next(lm.parameters()).dtype
        self.device: torch.device = next(lm.parameters()).device
        self._rotary = find_rotary(self.body, name)
        self._keyword = {id(module): cache_keyword(module.forward) for module in (self.lm, self.body)}
        self._trims_logits = "logits_to_keep" in inspect.signature(lm.forward).parameters

    @torch.inference_mode()
    def prefill(self, ids: Ids, past: KV | None = None, hidden: bool = False) -> KV:
        """The cache of ``past`` and ``ids`` together, from the body alone (no vocabulary logits).

        With ``hidden`` it has the final hidden states: the last layer's output after the final norm, which the
        vocabulary projection reads. A ``past`` must then have its own.
        """
        return self.export(self.begin(ids, past, hidden))

    @torch.inference_mode()
    def begin(self, ids: Ids, past: KV | None = None, hidden: bool = False) -> Running:
        """The model once it has read ``ids`` after ``past``; with the final hidden states of both if asked."""
        running = self.inject(past)
        states = self.extend(running, ids)
        if not hidden:
            return running
        if past is not None and past.tokens:
            if past.hidden is None:
                raise KvxferError(f"{self.name}: the cache that these tokens follow has no hidden states")
            states = torch.cat([past.hidden.to(states), states], dim=1)
        return replace(running, hidden=states)

    def export(self, running: Running) -> KV:
        """What a running model's cache holds: its tensors themselves, no copy."""
        return replace(read_cache(running.cache, self.name), hidden=running.hidden)

    def inject(self, past: KV | None) -> Running:
        """The model as if it had read what ``past`` holds, in a cache of its own (a copy)."""
        return Running(self._cache(past))

    @torch.inference_mode()
    def extend(self, running: Running, ids: Ids) -> Float[Tensor, "batch tokens hidden"]:
        """Read more tokens with the body alone, and return their final hidden states."""
        return self._forward(self.body, ids, running.cache).last_hidden_state

    @torch.inference_mode()
    def next_token(self, running: Running, ids: Ids) -> Int[Tensor, " batch"]:
        """Read more tokens and return the likeliest one to follow."""
        return self.next_logits(running, ids).argmax(dim=-1)

    @torch.inference_mode()
    def next_logits(self, running: Running, ids: Ids) -> Float[Tensor, "batch vocab"]:
        """Read more tokens and return the logits of what follows them, those of the last alone where possible."""
        return self._last_logits(ids, running.cache, 1)[:, -1]

    @contextmanager
    def without_layers(self, but: int = 0) -> Iterator[None]:
        """Embedding, final norm and vocabulary projection with so many first layers: without, what any depth costs."""
        layers = layers_of(self.body, self.name)
        self.body.layers = layers[:but]
        try:
            yield
        finally:
            self.body.layers = layers

    @torch.inference_mode()
    def logits(self, ids: Ids, past: KV | None = None, keep: int | None = None) -> Float[Tensor, "batch kept vocab"]:
        """Float32 logits of the last ``keep`` tokens of ``ids`` (None: of all), which follow ``past``.

        ``past`` itself is left as it is.
        """
        return self._last_logits(ids, self._cache(past), ids.shape[1] if keep is None else keep).float()

    @torch.inference_mode()
    def steps(self, ids: Ids, past: KV | None) -> Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]:
        """Decode one token at a time: yields float32 logits, and is sent the tokens that were chosen from them."""
        running = self.inject(past)
        while True:
            chosen = yield self.next_logits(running, ids).float()
            ids = chosen[:, None]

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens after which this model has nothing more to say, by its generation config and its tokenizer."""
        found = getattr(getattr(self.lm, "generation_config", None), "eos_token_id", None)
        listed = found if isinstance(found, list | tuple) else [found]
        return frozenset(token for token in (*listed, self.tokenizer.eos_token_id) if token is not None)

    @torch.inference_mode()
    def generate(
        self,
        ids: Ids,
        past: KV | None,
        max_new_tokens: int,
        stop: int | None = None,
        noise: Callable[[int], Float[Tensor, "batch vocab"]] | None = None,
    ) -> Int[Tensor, "batch new"]:
        """Continuation of ``past`` and ``ids``: at every step the token of the largest logit.

        Args:
            stop: end early once every row has given it. A row that has given it (it is part of the result) is filled up
                with it.
            noise: what is added to the logits of each step (0, 1, ...) before the largest is taken. Gumbel noise times
                a temperature draws a sample at that temperature (the Gumbel-max trick); the same noise gives two models
                the same luck.
        """
        running = self.inject(past)
        ids = ids.to(self.device)
        done = torch.zeros(ids.shape[0], dtype=torch.bool, device=self.device)
        new: list[Tensor] = []
        for step in range(max_new_tokens):
            logits = self.next_logits(running, ids)
            token = (logits if noise is None else logits.float() + noise(step).to(self.device)).argmax(dim=-1)
            if stop is not None:
                token = torch.where(done, torch.full_like(token, stop), token)
                done |= token == stop
            new.append(token)
            if stop is not None and bool(done.all()):
                break
            ids = token[:, None]
        return torch.stack(new, dim=1) if new else ids[:, :0]

    def cos_sin(
        self, tokens: int, start: int = 0
    ) -> tuple[Float[Tensor, "tokens rotary_dim"], Float[Tensor, "tokens rotary_dim"]]:
        """cos and sin of ``tokens`` positions from ``start`` on: float32, without the attention scaling."""
        return cos_sin(self._rotary, tokens, start, self.device)

    @torch.inference_mode()
    def queries(self, ids: Ids) -> tuple[KV, LayerTensors]:
        """The prefill of ``ids``, and each layer's queries as attention sees them (rotated, scaled by the model)."""
        cache = self._cache(None)
        with captured_queries(self.body) as found:
            self._forward(self.body, ids, cache)
        return read_cache(cache, self.name), self._by_layer(found, "queries", WITHOUT_QUERIES)

    @torch.inference_mode()
    def observe(self, ids: Ids, logits: bool = True) -> Observed:
        """The cache, queries and attention outputs of ``ids``, with the logits of every token if asked."""
        cache = self._cache(None)
        with captured_queries(self.body) as queries, captured_outputs(self.body, self.name) as outputs:
            found = self._forward(self.lm if logits else self.body, ids, cache)
        own = read_cache(cache, self.name)
        seen = self._by_layer(queries, "queries", TRAINED_INSTEAD), self._by_layer(outputs, "output", TRAINED_INSTEAD)
        return Observed(own, *seen, found.logits if logits else None)

    def follow(self, ids: Ids, past: KV) -> Followed:
        """What the model makes of ``ids`` after ``past``, with gradients to ``past`` where they are on."""
        with captured_outputs(self.body, self.name) as outputs:
            logits = self._forward(self.lm, ids, self._cache(past)).logits
        return Followed(logits.float(), self._by_layer(outputs, "output", TRAINED_INSTEAD))

    def softmax_scales(self, instead: str = "calibration.weights=none") -> list[float]:
        """What each layer multiplies products of queries and keys with before the softmax.

        Args:
            instead: the setting that does without attention probabilities, for the error.

        Raises:
            KvxferError: a layer's attention is more than a softmax of these products.
        """
        found = []
        for number, attention in enumerate(attentions(self.body, self.name, instead)):
            for extra in ("attn_logit_softcapping", "sinks"):
                if getattr(attention, extra, None) is not None:
                    raise KvxferError(
                        f"{self.name}: layer {number}'s attention has {extra}, which kvxfer does not compute; set "
                        f"{instead}"
                    )
            found.append(float(getattr(attention, "scaling", self.geometry.head_dim**-0.5)))
        return found

    @torch.inference_mode()
    def check_softmax(self, instead: str) -> None:
        """Refuse a model whose attention is not the softmax that is computed of its queries, keys and values here.

        Args:
            instead: the setting that does without, for the error.
        """
        # Any tokens tell it, as far as a sliding window reaches.
        tokens = min(SOFTMAX_TOKENS, self.geometry.window or SOFTMAX_TOKENS)
        ids = torch.arange(tokens)[None] % self.geometry.vocabulary
        self.output_projections(instead)
        seen, scales = self.observe(ids, logits=False), self.softmax_scales(instead)
        for layer, (query, output, scale) in enumerate(zip(seen.queries, seen.attention, scales, strict=True)):
            key, value = (kept[layer].float() for kept in (seen.kv.keys, seen.kv.values))
            heads = scaled_dot_product_attention(
                query.float(), key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            own = self.project(layer, heads.transpose(1, 2).flatten(2))
            off = float((own - output.float()).norm() / output.float().norm().clamp_min(1e-30))
            if not off <= SOFTMAX_TOLERANCE[self.dtype]:
                raise KvxferError(
                    f"{self.name}: layer {layer}'s attention is more than a softmax of queries and keys over values "
                    f"({off:.2g} of its output differs), which kvxfer does not compute; set {instead}"
                )

    @torch.inference_mode()
    def embeddings(self, ids: Ids) -> Float[Tensor, "batch tokens hidden"]:
        """The input embeddings of tokens, float32."""
        return self.body.get_input_embeddings()(ids.to(self.device)).float()

    @torch.inference_mode()
    def first_layer(self, ids: Ids) -> KV:
        """The cache of the first layer alone: a function of each token and its position, not of other tokens."""
        cache = self._cache(None)
        with self.without_layers(but=1):
            self._forward(self.body, ids, cache)
        return KV([cache.layers[0].keys], [cache.layers[0].values])

    def output_projections(self, instead: str) -> list[Any]:
        """Each layer's output projection; ``instead`` is the setting that does without, for the error."""
        return output_projections(self.body, self.name, instead)

    def output_grams(self) -> Float[Tensor, "layers kv_heads dim dim"]:
        """Gram of each layer's output projection, summed over the query heads that share a KV head, float32.

        What an error of a value does to the attention's output is the error times its head's columns of W_O.
        """
        grams = []
        for projection in self.output_projections("calibration.metrics=false"):
            heads = projection.weight.float().T.unflatten(0, (self.geometry.heads, self.geometry.head_dim))
            by_head = heads @ heads.mT
            grams.append(by_head.unflatten(0, (self.geometry.kv_heads, -1)).sum(1))
        return torch.stack(grams)

    def attention_outputs(
        self, instead: str = "calibration.probe_rows=0"
    ) -> list[tuple[Float[Tensor, "hidden heads_dim"], float]]:
        """Each layer's output projection W_O (without its bias) and the scale of its softmax.

        Args:
            instead: the setting that does without attention's outputs, for the error.
        """
        projections = self.output_projections(instead)
        return [(each.weight, scale) for each, scale in zip(projections, self.softmax_scales(instead), strict=True)]

    def project(
        self, layer: int, heads: Float[Tensor, "batch tokens heads_dim"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """A layer's attention output, float32, of its heads' outputs side by side: W_O with its bias."""
        projection: Any = self.body.layers[layer].self_attn.o_proj
        bias = None if projection.bias is None else projection.bias.float()
        return linear(heads.float(), projection.weight.float(), bias)

    def check_ids(self, ids: Ids) -> None:
        """Refuse a token that the model has no embedding of."""
        vocabulary = self.geometry.vocabulary
        if ids.numel() and (worst := int(ids.max())) >= vocabulary:
            raise KvxferError(
                f"{self.name}: the text has token {worst} ({self.tokenizer.convert_ids_to_tokens(worst)!r}) and the "
                f"model embeds {vocabulary} (vocab_size); take it out of the text, or resize the model's embedding"
            )

    def _by_layer(self, found: dict[int, Tensor], what: str, instead: str) -> list[Tensor]:
        missing = [layer for layer in range(self.geometry.layers) if layer not in found]
        if missing:
            raise KvxferError(f"{self.name}: layer {missing[0]}'s attention does not show its {what}; set {instead}")
        return [found[layer] for layer in range(self.geometry.layers)]

    def _cache(self, past: KV | None) -> DynamicCache:
        return build_cache(None if past is None else past.apply(lambda x: x.to(self.device, self.dtype)))

    def _last_logits(self, ids: Ids, cache: DynamicCache, keep: int) -> Float[Tensor, "batch kept vocab"]:
        last = {"logits_to_keep": keep} if self._trims_logits else {}
        return self._forward(self.lm, ids, cache, **last).logits[:, -keep:]

    def _forward(self, module: Any, ids: Ids, cache: DynamicCache, **options: Any) -> Any:
        """One forward with positions and mask spelt out; it extends ``cache``."""
        batch, new = ids.shape
        if ids.device.type == "cpu":  # elsewhere looking would hold up the device
            self.check_ids(ids)
        start = cache.get_seq_length()
        positions = torch.arange(start, start + new, device=self.device).expand(batch, new)
        mask = torch.ones(batch, start + new, dtype=torch.long, device=self.device)
        options[self._keyword[id(module)]] = cache
        ids = ids.to(self.device)
        return module(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **options)
