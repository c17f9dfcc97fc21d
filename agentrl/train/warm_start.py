"""Supervised steps on an environment's demonstrations, before any reinforcement learning. Called by `launch`.

Invariant: the loss is on what the model would have sampled, in tokens that the gateway would have recorded.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from agentrl.core.config import WarmStartConfig
from agentrl.core.environment import Environment
from agentrl.core.errors import TrainError
from agentrl.core.rendering import ConversationRenderer
from agentrl.train.model import token_logprobs
from agentrl.train.packing import TokenSequence, pack

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
RAMP = 20
"""Steps over which the learning rate rises."""
FLOOR = 0.05
"""Share of the learning rate that is left at the end of its cosine."""
PACK_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """One supervised step."""

    step: int
    steps: int
    loss: float
    """Nats a token."""
    accuracy: float
    """Share of tokens that are the model's first choice."""
    elapsed_s: float


def examples(
    environment: Environment, renderer: ConversationRenderer, *, seed: int, noise: float
) -> Iterator[TokenSequence]:
    """Demonstrations as token sequences, in the environment's order."""
    for demonstration in environment.demonstrations(seed, noise):
        ids, mask = renderer.demonstration(demonstration.messages, environment.tools)
        targets = [i for i, spoken in enumerate(mask) if spoken]
        yield TokenSequence(torch.tensor(ids), torch.tensor(targets))


def learning_rate(step: int, config: WarmStartConfig) -> float:
    """Linear ramp, then a cosine down to a floor; `step` counts from 0."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / config.steps))
    return config.lr * min(1.0, (step + 1) / RAMP) * (cosine + FLOOR)


def warm_start(
    model: torch.nn.Module,
    sequences: Iterator[TokenSequence],
    config: WarmStartConfig,
    *,
    progress: Callable[[WarmProgress], None],
) -> None:
    """Take `config.steps` supervised steps on the model, in place. TrainError when the loss is not finite."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    began = time.perf_counter()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss, accuracy = _step(model, optimizer, list(itertools.islice(sequences, config.batch)))
        if not math.isfinite(loss):
            raise TrainError(
                f"warm start step {step + 1}: the loss is {loss}; nothing was saved: lower warm_start.lr ({config.lr})"
            )
        progress(WarmProgress(step + 1, config.steps, loss, accuracy, time.perf_counter() - began))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[TokenSequence]) -> tuple[float, float]:
    trained = sum(len(sequence.targets) for sequence in batch)
    total = right = 0.0
    optimizer.zero_grad(set_to_none=True)
    for one in pack(batch, PACK_TOKENS, share_rows=False):
        found = token_logprobs(model, one)
        loss = -found.logprobs.sum() / trained
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        right += float(found.first.sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total, right / trained
