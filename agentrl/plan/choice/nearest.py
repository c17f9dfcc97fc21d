"""The nearest cluster on which a plan that fits nowhere would fit. Called by `choose` to finish its error.

Invariant: what is named was computed with the ledger's own memory checks: a plan that follows it runs.
"""

from __future__ import annotations

import math

from agentrl.core.errors import ConfigError
from agentrl.plan.hardware import GPUS
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout, TrainerMemory

_MOST_GPUS = 65_536


def with_cluster(plan: PlanInput, *, gpu: str, gpus: int, instance: int) -> PlanInput:
    """The same plan on other GPUs; made anew, since a plan remembers its GPU's data sheet."""
    tree = plan.model_dump(exclude_unset=True)
    tree["cluster"] |= {"gpu": gpu, "gpus": gpus}
    tree["rollout"] = tree.get("rollout", {}) | {"gpus_per_instance": instance}
    tree.setdefault("form", {}).pop("rollout_gpus", None)
    return PlanInput.model_validate(tree)


def least_instance(plan: PlanInput, gpu: str) -> int | None:
    """Fewest GPUs, as a power of two, that hold the weights and the KV of one sequence."""
    size = 1
    while size <= _MOST_GPUS:
        try:
            _ = Rollout(with_cluster(plan, gpu=gpu, gpus=size, instance=size), size).pool
        except ConfigError:
            size *= 2
        else:
            return size
    return None


def least_gpus(plan: PlanInput, gpu: str) -> int | None:
    """Fewest GPUs, in whole nodes, on which the colocated form fits. None when no number does."""
    instance = least_instance(plan, gpu)
    if instance is None:
        return None
    trainer = TrainerMemory(with_cluster(plan, gpu=gpu, gpus=instance, instance=instance), instance).least_gpus
    if trainer == 0:
        return None
    node = plan.cluster.gpus_per_node
    return math.ceil(max(trainer, instance) / node) * node


def nearest_cluster(plan: PlanInput) -> str | None:
    """Words for an error: more of the same GPU, and the smallest GPU of which the same number is enough. None where no
    cluster helps, since the activations of a micro-batch do not fit."""
    choices = []
    more = least_gpus(plan, plan.gpu.name)
    if more is not None:
        choices.append(f"{more} {plan.gpu.name} with rollout.gpus_per_instance = {least_instance(plan, plan.gpu.name)}")
    larger = sorted(
        (gpu for gpu in GPUS.values() if gpu.memory_bytes > plan.gpu.memory_bytes), key=lambda gpu: gpu.memory_bytes
    )
    for gpu in larger:
        fits = least_gpus(plan, gpu.name)
        if fits is not None and fits <= plan.cluster.gpus:
            size = least_instance(plan, gpu.name)
            choices.append(f"{plan.cluster.gpus} {gpu.name} with rollout.gpus_per_instance = {size}")
            break
    if not choices and TrainerMemory(plan, plan.cluster.gpus).least_gpus == 0:
        return None
    return " or ".join(choices) or "a smaller model"
