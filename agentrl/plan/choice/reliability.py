"""What saving and failing cost over the whole run. Called by `choose` with the chosen form's step."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.plan.choice import checkpoints, failures
from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import TrainerMemory
from agentrl.plan.ledger.given import Given


@dataclass(frozen=True)
class Reliability:
    checkpoint_bytes: Figure
    write_s: Figure
    """Until a checkpoint is durable; a synchronous save stops the trainer this long."""
    copy_s: Figure
    """Until it is in host memory; an asynchronous save stops the trainer this long."""
    mtbf_s: Figure
    """Of the cluster."""
    young_s: Figure
    """Of asynchronous saves."""
    interval_s: Figure
    """Young's, but no shorter than a write."""
    interval_steps: Figure
    overhead: Figure
    work_s: Figure
    """The run without a failure or a checkpoint."""
    failures: Figure
    restart_s: Figure
    redone_s: Figure
    run_s: Figure
    """The run with all of it."""


def reliability(plan: PlanInput, step_s: Quantity, trainer_gpus: int) -> Reliability:
    given = Given(plan)
    size = TrainerMemory(plan, trainer_gpus).whole_state
    write = checkpoints.checkpoint_write_s(size, given.assumed("checkpoint_bytes_per_s", "B/s"))
    rate = given.assumed("host_copy_bytes_per_s", "B/s")
    copy = checkpoints.checkpoint_copy_s(size, given.gpus("trainer_gpus", trainer_gpus), rate)
    gpu_mtbf = Input("gpu_mtbf_s", plan.run.gpu_mtbf_hours * 3600, "s", "[run] gpu_mtbf_hours")
    mtbf = failures.cluster_mtbf_s(gpu_mtbf, given.gpus("gpus", plan.cluster.gpus))
    young = checkpoints.young_interval_s(copy, mtbf)
    interval = checkpoints.checkpoint_interval_s(young, write)
    steps, restart = (
        Input("steps", plan.run.steps, "", "[run]"),
        Input("one_restart_s", plan.run.restart_s, "s", "[run]"),
    )
    work = Figure("work_s", steps.value * step_s.value, "s", f"{steps.name} x {step_s.name}", (steps, step_s))
    run = failures.run_with_failures_s(work, copy, interval, restart, mtbf)
    count = failures.failures(run, mtbf)
    every = Figure(
        "checkpoint_interval_steps",
        interval.value / step_s.value,
        "steps",
        f"{interval.name} / {step_s.name}",
        (interval, step_s),
    )
    return Reliability(
        checkpoint_bytes=size,
        write_s=write,
        copy_s=copy,
        mtbf_s=mtbf,
        young_s=young,
        interval_s=interval,
        interval_steps=every,
        overhead=checkpoints.checkpoint_overhead(interval, copy, mtbf),
        work_s=work,
        failures=count,
        restart_s=failures.restart_s(count, restart),
        redone_s=failures.redone_s(count, interval),
        run_s=run,
    )
