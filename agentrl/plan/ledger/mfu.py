"""Model FLOPs utilization of a whole step and where the rest goes. Called by ledger, choice and report.

The denominator is every GPU of the run at its peak for the step's wall clock, idle ones included. Invariant: the
waterfall's parts sum to one; a part below zero means that phases hold more GPU seconds than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.plan.figure import Figure, Quantity, total

_ROUNDING = 1e-12
_PALM = "Chowdhery et al. 2022, PaLM, appendix B (model FLOPs utilization)"


def step_mfu(flops: Quantity, gpus: Quantity, peak: Quantity, step: Quantity) -> Figure:
    value = flops.value / (gpus.value * peak.value * step.value)
    formula = f"{flops.name} / ({gpus.name} x {peak.name} x {step.name})"
    return Figure("step_mfu", value, "share", formula, (flops, gpus, peak, step), _PALM)


@dataclass(frozen=True)
class Phase:
    """A part of a step on some GPUs: how long they are held, and the FLOPs they do in that time."""

    name: str
    """snake_case; the waterfall's loss is `{name}_loss`."""
    seconds: Quantity
    gpus: Quantity
    flops: Quantity | None = None


def waterfall(phases: tuple[Phase, ...], gpus: Quantity, peak: Quantity, step: Quantity) -> tuple[Figure, ...]:
    """Shares of the run's peak: what does useful work, what each phase loses, and what stands idle.

    `phases` may overlap in time on different GPUs. Idle is the GPU seconds that no phase holds.
    """
    whole = Figure("run_gpu_s", gpus.value * step.value, "GPU s", f"{gpus.name} x {step.name}", (gpus, step))
    worked: list[Figure] = []
    lost: list[Figure] = []
    held: list[Figure] = []
    for phase in phases:
        seconds = Figure(
            f"{phase.name}_gpu_s", phase.seconds.value * phase.gpus.value, "GPU s",
            f"{phase.seconds.name} x {phase.gpus.name}", (phase.seconds, phase.gpus),
        )  # fmt: skip
        held.append(seconds)
        useful = 0.0
        if phase.flops is not None:
            useful = phase.flops.value / (peak.value * whole.value)
            formula = f"{phase.flops.name} / ({peak.name} x {whole.name})"
            worked.append(Figure(f"{phase.name}_useful", useful, "share", formula, (phase.flops, peak, whole), _PALM))
        value = seconds.value / whole.value - useful
        formula, inputs = (
            f"{seconds.name} / {whole.name}",
            (seconds, whole, *worked[-1:]) if phase.flops else (seconds, whole),
        )
        if phase.flops is not None:
            formula += f" - {phase.name}_useful"
        lost.append(Figure(f"{phase.name}_loss", value, "share", formula, inputs, _PALM))
    used = total("held_gpu_s", "GPU s", held)
    idle_value = (whole.value - used.value) / whole.value
    if abs(idle_value) < _ROUNDING:
        idle_value = 0.0
    idle = Figure("idle_loss", idle_value, "share", f"1 - {used.name} / {whole.name}", (used, whole), _PALM)
    return total("useful_share", "share", worked), *lost, idle
