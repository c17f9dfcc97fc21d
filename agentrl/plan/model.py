"""A model's sizes from its Hugging Face config.json: parameters, bytes of KV a token, FLOPs of attention.

Read by `inputs` from a folder, a file or the table of known models. Knows decoders of the Llama family: grouped-query
or multi-head latent attention, dense or mixture-of-experts layers, tied or untied embeddings. Invariant: `parameters`
equals what transformers counts in the built model (buffers and multi-token-prediction layers are left out).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.plan.known_models import CONFIGS


@dataclass(frozen=True)
class Attention:
    parameters: int
    """Of one layer."""
    kv_values: int
    """Numbers cached for one token in one layer."""
    pair_flops: int
    """Forward FLOPs for one pair of query and key in one layer."""


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    vocabulary: int
    parameters: int
    active_parameters: int
    """Those that one token passes through; equals `parameters` in a dense model."""
    experts: int
    """In a mixture-of-experts layer; 0 in a dense model."""
    experts_per_token: int
    sparse_layers: int
    """Layers with experts."""
    attention: Attention
    source: str

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    def touched_parameters(self, tokens: float) -> float:
        """Parameters that a batch of `tokens` passes through, when each token picks its experts at random."""
        if not self.is_moe:
            return self.parameters
        used = self.experts_per_token / self.experts
        in_experts = self.parameters - self.parameters_outside_experts
        return self.parameters - in_experts * math.pow(1 - used, tokens)

    @property
    def parameters_outside_experts(self) -> float:
        if not self.is_moe:
            return self.parameters
        used = self.experts_per_token / self.experts
        return self.parameters - (self.parameters - self.active_parameters) / (1 - used)

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        return self.layers * self.attention.kv_values * bytes_per_value


def model_named(name: str) -> Model:
    """A model of the table, whatever the case. ConfigError names the nearest valid choice."""
    folded = {key.lower(): key for key in CONFIGS}
    key = folded.get(name.lower())
    if key is None:
        near = folded[difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.0)[0]]
        raise ConfigError(f"model.name: unknown model {name!r}; nearest is {near!r}, known are {', '.join(CONFIGS)}")
    return parse_model(CONFIGS[key], key, f"config.json of {key}")


def read_model(path: Path) -> Model:
    """A model from a config.json or the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path: {file}: no such file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path: {file}: not valid JSON: {error}") from None
    return parse_model(config, path.name if path.is_dir() else path.parent.name, str(file))


def parse_model(config: Mapping[str, Any], name: str, source: str) -> Model:
    """A model from the content of a config.json."""
    config = config.get("text_config") or config
    try:
        return _parse(config, name, source)
    except KeyError as error:
        raise ConfigError(f"model: {source} lacks {error.args[0]!r}: not a decoder of the Llama family") from None


def _parse(config: Mapping[str, Any], name: str, source: str) -> Model:
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _grouped_attention(config)
    sparse = _sparse_layers(config)
    dense = layers - sparse
    ends = (1 if config.get("tie_word_embeddings", False) else 2) * vocabulary * hidden + hidden
    every = ends + layers * (attention.parameters + 2 * hidden) + dense * _mlp(config, "intermediate_size")
    experts, used, expert, fixed = _experts(config) if sparse else (0, 0, 0, 0)
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        parameters=every + sparse * (fixed + experts * expert),
        active_parameters=every + sparse * (fixed + used * expert),
        experts=experts,
        experts_per_token=used,
        sparse_layers=sparse,
        attention=attention,
        source=source,
    )


def _grouped_attention(config: Mapping[str, Any]) -> Attention:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    kind = config.get("model_type", "llama")
    parameters = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    if kind.startswith("qwen2") or config.get("attention_bias"):
        parameters += (heads + 2 * kv_heads) * size
    if config.get("attention_bias"):
        parameters += hidden
    if kind.startswith("qwen3"):
        parameters += 2 * size
    return Attention(parameters, kv_values=2 * kv_heads * size, pair_flops=4 * heads * size)


def _latent_attention(config: Mapping[str, Any]) -> Attention:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    query_rank = config.get("q_lora_rank")
    if query_rank:
        queries = hidden * query_rank + query_rank + query_rank * heads * (nope + rope)
    else:
        queries = hidden * heads * (nope + rope)
    keys_values = hidden * (latent + rope) + latent + latent * heads * (nope + value)
    return Attention(
        parameters=queries + keys_values + heads * value * hidden,
        kv_values=latent + rope,
        pair_flops=2 * heads * (nope + rope + value),
    )


def _mlp(config: Mapping[str, Any], size_key: str, count: int = 1) -> int:
    return int(3 * config["hidden_size"] * config[size_key] * count)


def _expert_count(config: Mapping[str, Any]) -> int:
    return config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0


def _sparse_layers(config: Mapping[str, Any]) -> int:
    if not _expert_count(config):
        return 0
    first = config.get("first_k_dense_replace", 0)
    every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    offset = 1 if "decoder_sparse_step" in config else 0
    plain = config.get("mlp_only_layers") or []
    return sum(
        layer >= first and (layer + offset) % every == 0 and layer not in plain
        for layer in range(config["num_hidden_layers"])
    )


def _experts(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Experts, experts used by a token, parameters of one, and parameters beside them, all of one layer."""
    hidden, count = config["hidden_size"], _expert_count(config)
    size_key = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    fixed = hidden * count
    if config.get("n_shared_experts"):
        fixed += _mlp(config, size_key, config["n_shared_experts"])
    if config.get("shared_expert_intermediate_size"):
        fixed += _mlp(config, "shared_expert_intermediate_size") + hidden
    return count, config["num_experts_per_tok"], _mlp(config, size_key), fixed
