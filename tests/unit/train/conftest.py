"""A small causal LM of each family, and batches of groups as the buffer hands them out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.core.protocols import Batch
from agentrl.core.types import Attempt, Episode, Failed, Group, Provenance, Sampling, Scored, Stop, Task, Trajectory

VOCABULARY = 64

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def small_model(family: str = "qwen2", seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    if family == "gpt2":
        shape = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=1
        )
        return GPT2LMHeadModel(shape).eval()
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SHAPE)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    }
    return makers[family]().eval()


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


def provenance(sampling: Sampling | None = None) -> Provenance:
    return Provenance(tokenizer="t", renderer="r", engine="e/1", sampling=sampling or Sampling())


def trajectory(
    name: str, rng: random.Random, *, version: int = 0, length: int | None = None, sampling: Sampling | None = None
) -> Trajectory:
    """Random tokens, about half of them trained."""
    length = length or rng.randrange(8, 40)
    mask = [0, *(rng.randrange(2) for _ in range(length - 2)), 1]
    return Trajectory(
        id=name,
        session_id=f"session-{name}",
        token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(-4 - rng.random() if m else None for m in mask),
        policy_versions=tuple(version if m else None for m in mask),
        finish="terminated",
        session_tokens=sum(mask),
        provenance=provenance(sampling),
    )


def episode(name: str, group: str, outcome: Scored | Failed, *trajectories: Trajectory, task: Task) -> Episode:
    return Episode(
        id=name, group_id=group, index=0, task=task, env_version="1", session_id=f"session-{name}", sandbox_id=None,
        trajectories=trajectories, attempt=Attempt(stop=Stop.DONE, turns=1, transcript=()), outcome=outcome,
    )  # fmt: skip


def make_batch(step: int = 1, *, groups: int = 3, size: int = 4, version: int = 0, seed: int = 0) -> Batch:
    """Groups with rewards 0 and 1 in turn."""
    rng = random.Random(f"{seed} {step}")
    made = []
    for g in range(groups):
        task = Task(env="test", id=f"task-{g}", source="even" if g % 2 == 0 else "odd")
        episodes = tuple(
            episode(f"{step}.{g}.{i}", f"{step}.{g}", Scored(reward=float(i % 2)),
                    trajectory(f"{step}.{g}.{i}", rng, version=version), task=task)
            for i in range(size)
        )  # fmt: skip
        made.append(Group(id=f"{step}.{g}", task=task, size=size, episodes=episodes))
    return Batch(step=step, groups=tuple(made))
