"""What loading new weights costs: the bubble it leaves in the rollout pool, and the tax it puts on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput

YEAR_H = 365 * 24


@dataclass(frozen=True)
class SyncCost:
    step_sync_s: Quantity
    bubble: Figure
    """Share of its time that the rollout pool stands still for weights."""
    share: Figure
    """Share of a step in which all GPUs wait for weights."""
    tax_gpus: Figure
    usd_per_year: Figure


def sync_bubble(sync_s: Quantity, mini_batches: Quantity, mini_batch_s: Quantity) -> Figure:
    """Share of its time that the rollout pool stands still, when weights are loaded every `mini_batches` updates."""
    return Figure(
        "sync_bubble",
        sync_s.value / (mini_batches.value * mini_batch_s.value + sync_s.value),
        "share",
        f"{sync_s.name} / ({mini_batches.name} x {mini_batch_s.name} + {sync_s.name})",
        (sync_s, mini_batches, mini_batch_s),
        "verl documentation, parameter_sync_step",
    )


def sync_share(sync_s: Quantity, step_s: Quantity) -> Figure:
    """Share of a step in which every GPU waits for weights."""
    return Figure(
        "sync_share", sync_s.value / step_s.value, "share", f"{sync_s.name} / {step_s.name}", (sync_s, step_s)
    )


def sync_tax_gpus(share: Quantity, gpus: Quantity) -> Figure:
    """GPUs that the wait is worth: as if so many were switched off for good."""
    return Figure("sync_tax_gpus", share.value * gpus.value, "GPUs", f"{share.name} x {gpus.name}", (share, gpus))


def sync_tax_usd_per_year(idle_gpus: Quantity, usd_per_gpu_hour: Quantity) -> Figure:
    return Figure(
        "sync_tax_usd_per_year",
        idle_gpus.value * usd_per_gpu_hour.value * YEAR_H,
        "$",
        f"{idle_gpus.name} x {usd_per_gpu_hour.name} x {YEAR_H} h",
        (idle_gpus, usd_per_gpu_hour),
    )


def sync_cost(plan: PlanInput, step_s: Quantity, step_sync_s: Quantity, syncs: Quantity) -> SyncCost:
    """Of a form's step with so many syncs in it."""
    updates = Input("updates", plan.trainer.updates, source="[trainer]")
    between = Figure("updates_per_sync", updates.value / syncs.value, "", f"updates / {syncs.name}", (updates, syncs))
    update = Figure(
        "update_interval_s",
        (step_s.value - step_sync_s.value) / updates.value,
        "s",
        f"({step_s.name} - {step_sync_s.name}) / updates",
        (step_s, step_sync_s, updates),
    )
    one = Figure(
        "one_sync_s", step_sync_s.value / syncs.value, "s", f"{step_sync_s.name} / {syncs.name}", (step_sync_s, syncs)
    )
    share = sync_share(step_sync_s, step_s)
    idle = sync_tax_gpus(share, Input("gpus", plan.cluster.gpus, "GPUs", "[cluster]"))
    price = Input("gpu_usd_per_hour", plan.gpu_usd_per_hour, "$/h", "[cluster] or the table's example price")
    return SyncCost(step_sync_s, sync_bubble(one, between, update), share, idle, sync_tax_usd_per_year(idle, price))
