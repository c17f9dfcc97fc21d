"""KV cache: bytes a token, bytes of a step, sequences that an instance holds. Called by `rollout` and `prefill`.

Invariant: the sequences in flight never need more bytes than the pool has.
"""

from __future__ import annotations

import math

from agentrl.plan.figure import Figure, Quantity

_PAGED = "Kwon et al. 2023, Efficient Memory Management for LLM Serving with PagedAttention"
_GQA = "Ainslie et al. 2023, GQA; DeepSeek-AI 2024, DeepSeek-V2 section 2.1 (MLA)"


def kv_bytes_per_token(layers: Quantity, kv_values: Quantity, value_bytes: Quantity) -> Figure:
    """Keys and values of one token: 2 x KV heads x head size a layer, or the latent and its rotary part (MLA)."""
    value = layers.value * kv_values.value * value_bytes.value
    formula = f"{layers.name} x {kv_values.name} x {value_bytes.name}"
    return Figure("kv_bytes_per_token", value, "B", formula, (layers, kv_values, value_bytes), _GQA)


def kv_bytes(name: str, tokens: Quantity, per_token: Quantity) -> Figure:
    """KV of a number of retained tokens."""
    value = tokens.value * per_token.value
    return Figure(name, value, "B", f"{tokens.name} x {per_token.name}", (tokens, per_token), _GQA)


def kv_of_memory(kv: Quantity, gpus: Quantity, gpu_memory: Quantity) -> Figure:
    """KV of the whole step as a multiple of the cluster's memory: above the pool's share, rollout goes in waves."""
    value = kv.value / (gpus.value * gpu_memory.value)
    formula = f"{kv.name} / ({gpus.name} x {gpu_memory.name})"
    return Figure("kv_of_cluster_memory", value, "ratio", formula, (kv, gpus, gpu_memory))


def pool_bytes(gpus: Quantity, gpu_memory: Quantity, share: Quantity, resident: Quantity, weights: Quantity) -> Figure:
    """What an instance has for KV: its share of memory less its weights and what the trainer left there."""
    value = gpus.value * (gpu_memory.value * share.value - resident.value) - weights.value
    formula = f"{gpus.name} x ({gpu_memory.name} x {share.name} - {resident.name}) - {weights.name}"
    inputs = (gpus, gpu_memory, share, resident, weights)
    return Figure("kv_pool_bytes", max(value, 0.0), "B", formula, inputs, _PAGED)


def concurrency(pool: Quantity, context: Quantity, per_token: Quantity) -> Figure:
    """Sequences that an instance holds at once."""
    value = math.floor(pool.value / (context.value * per_token.value)) if context.value * per_token.value else math.inf
    formula = f"floor({pool.name} / ({context.name} x {per_token.name}))"
    return Figure("instance_concurrency", value, "sequences", formula, (pool, context, per_token), _PAGED)


def waves(sequences: Quantity, instances: Quantity, held: Quantity) -> Figure:
    """How many times over the sequences fill all instances."""
    value = sequences.value / (instances.value * held.value) if held.value else math.inf
    formula = f"{sequences.name} / ({instances.name} x {held.name})"
    return Figure("waves", value, "waves", formula, (sequences, instances, held))


def residency(pool: Quantity, held_by_episodes: Quantity) -> Figure:
    """Share of the episodes' KV that the pool can keep while they wait for their environments."""
    value = min(1.0, pool.value / held_by_episodes.value) if held_by_episodes.value else 1.0
    formula = f"min(1, {pool.name} / {held_by_episodes.name})"
    return Figure("kv_residency", value, "share", formula, (pool, held_by_episodes), _PAGED)
