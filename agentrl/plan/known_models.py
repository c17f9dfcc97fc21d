"""The settings that size a model, as in the config.json of the public checkpoints. Read by `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _decoder(
    kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "head_dim": more.pop("head_dim", hidden // heads),
        **more,
    }


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, expert: int) -> Mapping[str, Any]:
    return _decoder(
        "qwen3_moe", hidden, inner, layers, heads, kv_heads, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=expert,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def _deepseek_v3(heads: int, layers: int, experts: int, first_dense: int, vocabulary: int) -> Mapping[str, Any]:
    return _decoder(
        "deepseek_v3", 7168, 18432, layers, heads, heads, vocabulary,
        head_dim=64, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=experts, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        first_k_dense_replace=first_dense,
    )  # fmt: skip


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-8B": _decoder("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": _decoder("llama", 8192, 28672, 80, 64, 8, 128256),
    "Llama-3.2-1B": _decoder("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "Qwen2.5-0.5B": _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-32B": _decoder("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "Qwen2.5-72B": _decoder("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "Qwen3-4B": _decoder("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": _decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Qwen3-32B": _decoder("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, 768),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 1536),
    "DeepSeek-V3": _deepseek_v3(128, 61, 256, 3, 129280),
    "Kimi-K2": _deepseek_v3(64, 61, 384, 1, 163840),
}
