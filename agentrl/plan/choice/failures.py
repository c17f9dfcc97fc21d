"""How often a cluster of this size fails over a run, and what that costs. Called by `choose`.

Failures are taken as independent with a constant rate, so that the cluster's time between failures is one GPU's
divided by their number.
"""

from __future__ import annotations

import math

from agentrl.plan.figure import Figure, Quantity

_RENEWAL = "renewal argument: a failure costs a restart and half a checkpoint interval on average"


def cluster_mtbf_s(gpu_mtbf_s: Quantity, gpus: Quantity) -> Figure:
    return Figure(
        "cluster_mtbf_s",
        gpu_mtbf_s.value / gpus.value,
        "s",
        f"{gpu_mtbf_s.name} / {gpus.name}",
        (gpu_mtbf_s, gpus),
        "independent failures at a constant rate",
    )


def failures(run_s: Quantity, mtbf_s: Quantity) -> Figure:
    """Expected over the run."""
    return Figure("failures", run_s.value / mtbf_s.value, "", f"{run_s.name} / {mtbf_s.name}", (run_s, mtbf_s))


def restart_s(count: Quantity, one_restart_s: Quantity) -> Figure:
    """Seconds of the run spent starting again."""
    return Figure(
        "restart_s",
        count.value * one_restart_s.value,
        "s",
        f"{count.name} x {one_restart_s.name}",
        (count, one_restart_s),
    )


def redone_s(count: Quantity, interval_s: Quantity) -> Figure:
    """Seconds of work done twice: half a checkpoint interval for each failure."""
    return Figure(
        "redone_s",
        count.value * interval_s.value / 2,
        "s",
        f"{count.name} x {interval_s.name} / 2",
        (count, interval_s),
    )


def run_with_failures_s(
    work_s: Quantity, cost_s: Quantity, interval_s: Quantity, one_restart_s: Quantity, mtbf_s: Quantity
) -> Figure:
    """Wall clock of a run with its checkpoints, restarts and redone work. Infinite when failures outpace progress."""
    lost = (one_restart_s.value + interval_s.value / 2) / mtbf_s.value
    saved = work_s.value * (1 + cost_s.value / interval_s.value)
    return Figure(
        "run_with_failures_s",
        saved / (1 - lost) if lost < 1 else math.inf,
        "s",
        f"{work_s.name} x (1 + {cost_s.name} / {interval_s.name})"
        f" / (1 - ({one_restart_s.name} + {interval_s.name} / 2) / {mtbf_s.name})",
        (work_s, cost_s, interval_s, one_restart_s, mtbf_s),
        _RENEWAL,
    )
