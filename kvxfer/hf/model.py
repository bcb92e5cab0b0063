"""A loaded language model as this project sees it: ids and KV in, KV, logits, tokens and queries out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvxfer.errors import KvxferError
from kvxfer.geometry import Geometry
from kvxfer.hf.cache import build_cache, cache_keyword, read_cache
from kvxfer.hf.queries import captured_queries
from kvxfer.hf.rotary import cos_sin, find_rotary
from kvxfer.kv import KV, LayerTensors

Ids = Int[Tensor, "batch tokens"]


class LoadedModel:
    """A causal language model in eval mode with an explicit cache: every method takes and returns plain tensors.

    Caches hold rotated keys and all tokens of all layers. What a method returns is made in inference mode: clone it
    before autograd may see it. ``name`` is the model as the user wrote it, ``revision`` what it resolved to, and
    ``dropped`` the layers of the whole model that it is run without.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        geometry: Geometry,
        name: str,
        revision: str,
        dropped: tuple[int, ...] = (),
    ) -> None:
        self.lm: Any = lm.eval().requires_grad_(False)
        self.body: Any = lm.base_model
        self.tokenizer = tokenizer
        self.geometry = geometry
        self.name = name
        self.revision = revision
        self.dropped = dropped
        self.dtype: torch.dtype = next(lm.parameters()).dtype
        self.device: torch.device = next(lm.parameters()).device
        self._rotary = find_rotary(self.body, name)
        self._keyword = {id(module): cache_keyword(module.forward) for module in (self.lm, self.body)}
        self._trims_logits = "logits_to_keep" in inspect.signature(lm.forward).parameters

    @torch.inference_mode()
    def prefill(self, ids: Ids, past: KV | None = None) -> KV:
        """The cache of ``past`` and ``ids`` together, from the body alone (no vocabulary logits)."""
        cache = self._cache(past)
        self._forward(self.body, ids, cache)
        return read_cache(cache, self.name)

    @torch.inference_mode()
    def prefill_with_hidden(self, ids: Ids, past: KV | None = None) -> KV:
        """The cache of ``past`` and ``ids`` with the final hidden states: the last layer's output after the final norm.

        That is what the body returns as ``last_hidden_state`` and what the vocabulary projection reads. A ``past`` must
        have its own.
        """
        cache = self._cache(past)
        hidden = self._forward(self.body, ids, cache).last_hidden_state
        if past is not None and past.tokens:
            if past.hidden is None:
                raise KvxferError(f"{self.name}: the cache that these tokens follow has no hidden states")
            hidden = torch.cat([past.hidden.to(hidden), hidden], dim=1)
        return replace(read_cache(cache, self.name), hidden=hidden)

    @torch.inference_mode()
    def logits(self, ids: Ids, past: KV | None = None, keep: int | None = None) -> Float[Tensor, "batch kept vocab"]:
        """Float32 logits of the last ``keep`` tokens of ``ids`` (None: of all), which follow ``past``.

        ``past`` itself is left as it is.
        """
        keep = ids.shape[1] if keep is None else keep
        last = {"logits_to_keep": keep} if self._trims_logits else {}
        return self._forward(self.lm, ids, self._cache(past), **last).logits[:, -keep:].float()

    @torch.inference_mode()
    def steps(self, ids: Ids, past: KV | None) -> Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]:
        """Decode one token at a time: yields float32 logits, and is sent the tokens that were chosen from them."""
        cache = self._cache(past)
        last = {"logits_to_keep": 1} if self._trims_logits else {}
        while True:
            chosen = yield self._forward(self.lm, ids.to(self.device), cache, **last).logits[:, -1].float()
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
        cache = self._cache(past)
        ids = ids.to(self.device)
        done = torch.zeros(ids.shape[0], dtype=torch.bool, device=self.device)
        new: list[Tensor] = []
        for step in range(max_new_tokens):
            last = {"logits_to_keep": 1} if self._trims_logits else {}
            logits = self._forward(self.lm, ids, cache, **last).logits[:, -1]
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
        return read_cache(cache, self.name), [found[layer] for layer in range(self.geometry.layers)]

    def softmax_scales(self, instead: str = "calibration.weights=none") -> list[float]:
        """What each layer multiplies products of queries and keys with before the softmax.

        Args:
            instead: the setting that does without attention probabilities, for the error.

        Raises:
            KvxferError: a layer's attention is more than a softmax of these products.
        """
        found = []
        for number, layer in enumerate(self.body.layers):
            for extra in ("attn_logit_softcapping", "sinks"):
                if getattr(layer.self_attn, extra, None) is not None:
                    raise KvxferError(
                        f"{self.name}: layer {number}'s attention has {extra}, which kvxfer does not compute; "
                        f"set {instead}"
                    )
            found.append(float(getattr(layer.self_attn, "scaling", self.geometry.head_dim**-0.5)))
        return found

    @torch.inference_mode()
    def embeddings(self, ids: Ids) -> Float[Tensor, "batch tokens hidden"]:
        """The input embeddings of tokens, float32."""
        return self.body.get_input_embeddings()(ids.to(self.device)).float()

    @torch.inference_mode()
    def first_layer(self, ids: Ids) -> KV:
        """The cache of the first layer alone: a function of each token and its position, not of other tokens."""
        layers = self.body.layers
        cache = self._cache(None)
        try:
            self.body.layers = layers[:1]
            self._forward(self.body, ids, cache)
        finally:
            self.body.layers = layers
        return KV([cache.layers[0].keys], [cache.layers[0].values])

    def output_grams(self) -> Float[Tensor, "layers kv_heads dim dim"]:
        """Gram of each layer's output projection, summed over the query heads that share a KV head, float32.

        What an error of a value does to the attention's output is the error times its head's columns of W_O.
        """
        grams = []
        for weight in self._output_projections("calibration.metrics=false"):
            heads = weight.float().T.unflatten(0, (self.geometry.heads, self.geometry.head_dim))
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
        return list(zip(self._output_projections(instead), self.softmax_scales(instead), strict=True))

    def _output_projections(self, instead: str) -> list[Float[Tensor, "hidden heads_dim"]]:
        """Each layer's W_O; ``instead`` is the setting that does without."""
        found = []
        for number, layer in enumerate(self.body.layers):
            projection = getattr(layer.self_attn, "o_proj", None)
            if projection is None:
                raise KvxferError(f"{self.name}: layer {number} has no o_proj to weigh values by; set {instead}")
            found.append(projection.weight)
        return found

    def _cache(self, past: KV | None) -> DynamicCache:
        return build_cache(None if past is None else past.apply(lambda x: x.to(self.device, self.dtype)))

    def _forward(self, module: Any, ids: Ids, cache: DynamicCache, **options: Any) -> Any:
        """One forward with positions and mask spelt out; it extends ``cache``."""
        batch, new = ids.shape
        start = cache.get_seq_length()
        positions = torch.arange(start, start + new, device=self.device).expand(batch, new)
        mask = torch.ones(batch, start + new, dtype=torch.long, device=self.device)
        options[self._keyword[id(module)]] = cache
        ids = ids.to(self.device)
        return module(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **options)
