"""What barriers and queues between the phases of a step cost. Called by `choose` and by people with a stopwatch.

Closed forms for constant durations; the simulator shows what spread adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plan.figure import Figure, Quantity, total


def sequential_s(first_s: Quantity, second_s: Quantity, batches: Quantity) -> Figure:
    """Two stages that take turns."""
    return Figure(
        "sequential_s",
        batches.value * (first_s.value + second_s.value),
        "s",
        f"{batches.name} x ({first_s.name} + {second_s.name})",
        (first_s, second_s, batches),
    )


def pipelined_s(first_s: Quantity, second_s: Quantity, batches: Quantity) -> Figure:
    """Two stages on their own resources: the pipe fills and drains once, and else runs at the slower stage."""
    slower = max(first_s.value, second_s.value)
    return Figure(
        "pipelined_s",
        first_s.value + second_s.value + (batches.value - 1) * slower,
        "s",
        f"{first_s.name} + {second_s.name} + ({batches.name} - 1) x max({first_s.name}, {second_s.name})",
        (first_s, second_s, batches),
        "two-stage pipeline with constant stage times",
    )


def speedup(before_s: Quantity, after_s: Quantity) -> Figure:
    return Figure(
        "speedup", before_s.value / after_s.value, "", f"{before_s.name} / {after_s.name}", (before_s, after_s)
    )


def barrier_utilization(durations_s: Sequence[Quantity]) -> Figure:
    """Share of the workers' time that is work, when all start together and wait for the slowest."""
    work = total("workers_s", "s", durations_s)
    slowest = max(durations_s, key=lambda duration: duration.value)
    return Figure(
        "barrier_utilization",
        work.value / (len(durations_s) * slowest.value),
        "share",
        f"{work.name} / ({len(durations_s)} x {slowest.name})",
        (work, slowest),
    )


def length_utilization(mean_tokens: Quantity, longest_tokens: Quantity) -> Figure:
    """The same from lengths: N * mean of useful decode steps in N * longest, whatever the order of starting."""
    return Figure(
        "length_utilization",
        mean_tokens.value / longest_tokens.value,
        "share",
        f"{mean_tokens.name} / {longest_tokens.name}",
        (mean_tokens, longest_tokens),
    )


def queue_load(arrivals_per_s: Quantity, served_per_s: Quantity) -> Figure:
    """rho. Below 1 the queue is stable; that says nothing of how long it gets."""
    return Figure(
        "queue_load",
        arrivals_per_s.value / served_per_s.value,
        "share",
        f"{arrivals_per_s.name} / {served_per_s.name}",
        (arrivals_per_s, served_per_s),
        "Kleinrock 1975, Queueing Systems, volume 1",
    )
