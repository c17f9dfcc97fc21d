"""What loading new weights in the middle of samples costs: their prefixes are computed again. Called by `phases`."""

from __future__ import annotations

from agentrl.plan.figure import Figure, Quantity


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
