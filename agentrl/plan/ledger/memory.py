"""Memory of one GPU by owner, while it trains and while it decodes. Called by the ledger and by the choice's check.

Invariant: the parts of a stack, its free part among them, sum to the GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.errors import ConfigError
from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.rollout import Rollout

_ZERO = "Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 3"
_MEGATRON = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4"


@dataclass(frozen=True)
class Stack:
    """What fills one GPU in one phase."""

    phase: str
    parts: tuple[Figure, ...]
    used: Figure
    free: Figure
    """Negative when the parts do not fit."""
    capacity: Input

    @property
    def fits(self) -> bool:
        return self.free.value >= 0


def stack(phase: str, parts: Sequence[Figure], capacity: Input) -> Stack:
    used = total(f"{phase}_used_bytes", "B", parts)
    formula = f"{capacity.name} - {used.name}"
    free = Figure(f"{phase}_free_bytes", capacity.value - used.value, "B", formula, (capacity, used))
    return Stack(phase, tuple(parts), used, free, capacity)


def sharded_bytes(name: str, parameters: Quantity, size: Quantity, gpus: Quantity) -> Figure:
    """State of `size` bytes a parameter, split evenly over the GPUs (ZeRO stage 3, FSDP)."""
    value = parameters.value * size.value / gpus.value
    formula = f"{parameters.name} x {size.name} / {gpus.name}"
    return Figure(name, value, "B", formula, (parameters, size, gpus), _ZERO)


def state_bytes(parameters: Quantity, weights: Quantity, gradients: Quantity, optimizer: Quantity) -> Figure:
    """Weights, gradients and optimizer of the whole model: 16 bytes a parameter for bf16 with fp32 Adam."""
    value = parameters.value * (weights.value + gradients.value + optimizer.value)
    formula = f"{parameters.name} x ({weights.name} + {gradients.name} + {optimizer.name})"
    return Figure("training_state_bytes", value, "B", formula, (parameters, weights, gradients, optimizer), _ZERO)


def pinned_bytes(gpus: Quantity, parts: Sequence[Quantity]) -> Figure:
    """Host memory of one node for what its GPUs move out."""
    value = gpus.value * sum(part.value for part in parts)
    formula = f"{gpus.name} x ({' + '.join(part.name for part in parts)})"
    return Figure("pinned_host_bytes", value, "B", formula, (gpus, *parts))


class TrainerMemory:
    def __init__(self, plan: PlanInput, gpus: int) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.gpus = self.given.gpus("trainer_gpus", gpus)

    def _sharded(self, name: str, size: str) -> Figure:
        return sharded_bytes(name, self.given.parameters, self.given.trainer(size, "B"), self.gpus)

    @property
    def whole_state(self) -> Figure:
        """Of the policy, over all GPUs."""
        sizes = (self.given.trainer(f"{part}_bytes", "B") for part in ("weight", "gradient", "optimizer"))
        return state_bytes(self.given.parameters, *sizes)

    @property
    def state(self) -> tuple[Figure, ...]:
        """What stays for the whole phase, a GPU."""
        parts = [
            self._sharded("trainer_weights_gpu_bytes", "weight_bytes"),
            self._sharded("gradients_gpu_bytes", "gradient_bytes"),
            self._sharded("optimizer_gpu_bytes", "optimizer_bytes"),
        ]
        if self.plan.trainer.reference:
            parts.append(self._sharded("reference_gpu_bytes", "weight_bytes"))
        if self.plan.trainer.critic:
            whole = self.whole_state
            formula = f"{whole.name} / {self.gpus.name}"
            value = whole.value / self.gpus.value
            parts.append(Figure("critic_gpu_bytes", value, "B", formula, (whole, self.gpus), _ZERO))
        return tuple(parts)

    @property
    def activations(self) -> tuple[Figure, ...]:
        """Of one micro-batch: 34 bytes a token and hidden unit for a whole layer, 2 for a layer's input alone."""
        given, kept = self.given, not self.plan.trainer.recompute_activations
        tokens, share = given.trainer("micro_batch_tokens", "tokens"), given.trainer("model_parallel")
        whole, inputs = (given.layers.value, 0.0) if kept else (1.0, given.layers.value)
        value = tokens.value * given.hidden.value * (34 * whole + 2 * inputs) / share.value
        layers = "34 x layers" if kept else "34 + 2 x layers"
        formula = f"{tokens.name} x hidden x ({layers}) / {share.name}"
        activations = Figure(
            "activations_gpu_bytes", value, "B", formula, (tokens, given.hidden, given.layers, share), _MEGATRON
        )
        value = tokens.value * given.vocabulary.value * 4 / share.value
        formula = f"{tokens.name} x vocabulary x 4 / {share.name}"
        logits = Figure("logits_gpu_bytes", value, "B", formula, (tokens, given.vocabulary, share), _MEGATRON)
        return activations, logits

    @property
    def stack(self) -> Stack:
        return stack("training", (*self.state, *self.activations), self.given.memory_bytes)

    @property
    def least_gpus(self) -> int:
        """Fewest GPUs on which the trainer fits; 0 when the activations alone do not."""
        room = self.plan.trainer.memory_share * self.plan.gpu.memory_bytes
        room -= sum(part.value for part in self.activations)
        whole = sum(part.value for part in self.state) * self.gpus.value
        return math.ceil(whole / room) if room > 0 else 0

    def check(self) -> None:
        """Raises ConfigError when the trainer does not fit, with the nearest setting that does."""
        least = self.least_gpus
        if least == 0:
            raise ConfigError(
                f"trainer.micro_batch_tokens: activations of {self.plan.trainer.micro_batch_tokens} tokens do not fit "
                f"on a {self.plan.gpu.name}; at most {self._most_tokens()}, or raise trainer.model_parallel"
            )
        if self.gpus.value < least:
            each = sum(part.value for part in self.state) / 1e9
            raise ConfigError(
                f"cluster.gpus: {self.gpus.value:g} {self.plan.gpu.name} cannot hold the trainer of "
                f"{self.plan.shape.name} ({each:.0f} GB of state a GPU); at least {least}"
            )

    def _most_tokens(self) -> int:
        room = self.plan.trainer.memory_share * self.plan.gpu.memory_bytes
        per_token = sum(part.value for part in self.activations) / self.plan.trainer.micro_batch_tokens
        return int(room / per_token)


def rollout_stack(rollout: Rollout) -> Stack:
    """A GPU that decodes, alone or while the trainer's state is moved out."""
    given, resident = rollout.given, rollout.given.rollout("resident_bytes", "B")
    size = given.instance_gpus
    weights = Figure(
        "engine_weights_gpu_bytes",
        rollout.weight_bytes.value / size.value,
        "B",
        f"{rollout.weight_bytes.name} / {size.name}",
        (rollout.weight_bytes, size),
    )
    pool = rollout.pool
    kv = Figure("kv_pool_gpu_bytes", pool.value / size.value, "B", f"{pool.name} / {size.name}", (pool, size))
    parts = [weights, kv]
    if rollout.colocated and resident.value:
        parts.append(Figure("resident_gpu_bytes", resident.value, "B", resident.name, (resident,)))
    return stack("rollout", parts, given.memory_bytes)
