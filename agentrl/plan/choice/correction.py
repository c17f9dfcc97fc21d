"""What training on older samples costs: weights that concentrate, and prefixes that are computed again."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plan.figure import Figure, Quantity

_KISH = "Kish 1965, Survey sampling"


def effective_samples(weights: Sequence[Quantity]) -> Figure:
    """How many unweighted samples carry as much information as these importance weights leave."""
    first = sum(weight.value for weight in weights)
    second = sum(weight.value**2 for weight in weights)
    return Figure(
        "effective_samples",
        first**2 / second if second else 0.0,
        "",
        "(sum of weights)^2 / sum of squared weights",
        tuple(weights),
        _KISH,
    )


def effective_share(effective: Quantity, samples: Quantity) -> Figure:
    return Figure(
        "effective_share",
        effective.value / samples.value,
        "share",
        f"{effective.name} / {samples.name}",
        (effective, samples),
        _KISH,
    )


def running_sequences(instances: Quantity, concurrency: Quantity) -> Figure:
    """Sequences that a weight sync interrupts."""
    return Figure(
        "running_sequences",
        instances.value * concurrency.value,
        "sequences",
        f"{instances.name} x {concurrency.name}",
        (instances, concurrency),
    )


def continuation_flops(running: Quantity, generated_tokens: Quantity, active_parameters: Quantity) -> Figure:
    """Of one sync with partial rollouts: every running sequence prefills what it has so far under the new weights."""
    return Figure(
        "continuation_flops",
        2 * active_parameters.value * running.value * generated_tokens.value,
        "FLOP",
        f"2 x {active_parameters.name} x {running.name} x {generated_tokens.name}",
        (running, generated_tokens, active_parameters),
        "KV of the old weights must not be read by the new ones",
    )


def share_of_step(part: Quantity, whole: Quantity, name: str) -> Figure:
    return Figure(name, part.value / whole.value, "share", f"{part.name} / {whole.name}", (part, whole))
