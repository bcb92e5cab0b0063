"""A model's cache geometry, read from its config alone; what this project can't serve is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.initialization import no_init_weights

from kvxfer.errors import KvxferError
from kvxfer.models.geometry import Geometry, Rotary
from kvxfer.models.hf.rotary import find_rotary

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
LAYOUTS = ("full_attention", "sliding_attention")
# Config fields that only recurrent and hybrid decoders have.
RECURRENT_FIELDS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "attn_layer_indices",
    "linear_num_value_heads",
    "lru_width",
)


def read_geometry(config: PreTrainedConfig, name: str) -> Geometry:
    """The geometry of the (text) decoder of ``config``; ``name`` says in refusals whose it is.

    Raises KvxferError, naming field and value, for recurrent and hybrid layers, latent attention, shared caches, and
    rotary types whose angles depend on the sequence length or have more axes than one.
    """
    config = config.get_text_config(decoder=True)
    attention = _layouts(config, name)
    _refuse_other_caches(config, name)
    parameters = _rotary_parameters(config, name)
    body = _empty_body(config, name)
    rotary = find_rotary(body, name)
    sliding = "sliding_attention" in attention
    heads = config.num_attention_heads
    return Geometry(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        rotary=Rotary(
            type=parameters["rope_type"],
            theta=float(parameters["rope_theta"]),
            dim=2 * rotary.inv_freq.shape[-1],
            scaling=float(rotary.attention_scaling),
            parameters=parameters,
        ),
        attention=attention,
        window=config.sliding_window if sliding else None,
        max_positions=config.max_position_embeddings,
        body_parameters=_active_matrix_weights(body, config),
    )


def _layouts(config: PreTrainedConfig, name: str) -> tuple[str, ...]:
    """The attention layout of every layer."""
    for field in RECURRENT_FIELDS:
        if getattr(config, field, None) is not None:
            raise KvxferError(
                f"{name}: {config.model_type} has recurrent or hybrid layers ({field}: {getattr(config, field)}), "
                "which keep no keys and values; choose a model whose layers are all attention"
            )
    if not getattr(config, "num_attention_heads", None):
        raise KvxferError(f"{name}: {config.model_type} has no attention heads (num_attention_heads); unsupported")
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if types is None:
        types = [LAYOUTS[getattr(config, "sliding_window", None) is not None]] * config.num_hidden_layers
    for index, layout in enumerate(types):
        if layout not in LAYOUTS:
            raise KvxferError(
                f"{name}: layer {index} of {config.model_type} is {layout}; "
                f"pairs need {' or '.join(LAYOUTS)} in every layer"
            )
    return tuple(types)


def _refuse_other_caches(config: PreTrainedConfig, name: str) -> None:
    """Caches that do not hold one key and one value per layer, head and token."""
    if getattr(config, "kv_lora_rank", None):
        raise KvxferError(
            f"{name}: {config.model_type} has latent attention (kv_lora_rank: {config.kv_lora_rank}); unsupported, "
            "its cache is no keys and values per head"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise KvxferError(
            f"{name}: {config.model_type} shares keys and values between layers (num_kv_shared_layers: "
            f"{config.num_kv_shared_layers}); unsupported, every layer needs its own"
        )
    unrotated = [i for i, turned in enumerate(getattr(config, "no_rope_layers", None) or ()) if not turned]
    if unrotated:
        raise KvxferError(f"{name}: {config.model_type} has layers without rotary embedding (first: {unrotated[0]})")


def _rotary_parameters(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """The config's rotary parameters with a type and one theta."""
    parameters = getattr(config, "rope_parameters", None)
    supported = f"supported are {', '.join(ROTARY_TYPES)}"
    if not parameters:
        raise KvxferError(f"{name}: rotary type none ({config.model_type} has no rope_parameters); {supported}")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested and any(value != nested[0] for value in nested):
        raise KvxferError(
            f"{name}: {config.model_type} has a rotary embedding per layer type; {supported}, one for all"
        )
    parameters = dict(nested[0] if nested else parameters)
    if "mrope_section" in parameters:
        raise KvxferError(f"{name}: rotary type mrope (mrope_section: {parameters['mrope_section']}); {supported}")
    kind = parameters.get("rope_type", "default")
    if kind not in ROTARY_TYPES:
        raise KvxferError(f"{name}: rotary type {kind}; {supported}")
    return {**parameters, "rope_type": kind}


def _empty_body(config: PreTrainedConfig, name: str) -> Any:
    """The decoder without its weights: shapes and the rotary module."""
    try:
        with torch.device("meta"), no_init_weights():
            return AutoModel.from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise KvxferError(f"{name}: the config of {config.model_type} builds no decoder ({reason})") from error


def _active_matrix_weights(body: Any, config: PreTrainedConfig) -> int:
    """Matrix weights that one token meets: no embedding, no norms, and of stacked experts only the chosen share."""
    embedding = body.get_input_embeddings().weight
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    total = 0
    for weight in body.parameters():
        if weight is embedding or weight.dim() < 2:
            continue
        stacked = weight.dim() == 3 and weight.shape[0] == experts
        total += weight.numel() * chosen // experts if stacked else weight.numel()
    return total
