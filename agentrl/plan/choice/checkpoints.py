"""How long a checkpoint takes, how long it stops the run, and how often to write one.

Called by `reliability`. A checkpoint holds the training state, beside which the buffer and the tasks in flight are
small. Invariant: `young_interval_s` is the minimum of `checkpoint_overhead`.
"""

from __future__ import annotations

import math

from agentrl.plan.figure import Figure, Quantity

_YOUNG = "Young 1974, A first order approximation to the optimum checkpoint interval"


def checkpoint_write_s(size: Quantity, storage_bytes_per_s: Quantity) -> Figure:
    """Until the checkpoint is durable: what a synchronous save stops the run for."""
    return Figure(
        "checkpoint_write_s",
        size.value / storage_bytes_per_s.value,
        "s",
        f"{size.name} / {storage_bytes_per_s.name}",
        (size, storage_bytes_per_s),
    )


def checkpoint_copy_s(size: Quantity, gpus: Quantity, host_bytes_per_s: Quantity) -> Figure:
    """Until each GPU's shard is in host memory: what an asynchronous save stops the run for."""
    return Figure(
        "checkpoint_copy_s",
        size.value / gpus.value / host_bytes_per_s.value,
        "s",
        f"{size.name} / {gpus.name} / {host_bytes_per_s.name}",
        (size, gpus, host_bytes_per_s),
    )


def young_interval_s(cost_s: Quantity, mtbf_s: Quantity) -> Figure:
    """Seconds of work between two checkpoints that lose the least to saving and to redoing."""
    return Figure(
        "young_interval_s",
        math.sqrt(2 * cost_s.value * mtbf_s.value),
        "s",
        f"sqrt(2 x {cost_s.name} x {mtbf_s.name})",
        (cost_s, mtbf_s),
        _YOUNG,
    )


def checkpoint_interval_s(young_s: Quantity, write_s: Quantity) -> Figure:
    """Young's interval, but never shorter than one write: an asynchronous save must end before the next begins."""
    return Figure(
        "checkpoint_interval_s",
        max(young_s.value, write_s.value),
        "s",
        f"max({young_s.name}, {write_s.name})",
        (young_s, write_s),
        _YOUNG,
    )


def checkpoint_overhead(interval_s: Quantity, cost_s: Quantity, mtbf_s: Quantity) -> Figure:
    """Time lost to saving and to redoing half an interval after each failure, as a share of the work."""
    return Figure(
        "checkpoint_overhead",
        cost_s.value / interval_s.value + interval_s.value / (2 * mtbf_s.value),
        "share",
        f"{cost_s.name} / {interval_s.name} + {interval_s.name} / (2 x {mtbf_s.name})",
        (interval_s, cost_s, mtbf_s),
        _YOUNG,
    )
