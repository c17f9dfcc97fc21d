"""Time of the forward passes and of the update on a number of GPUs. Called by the ledger and by the choice.

Invariant: both scale with tokens and FLOPs alone; twice the GPUs halve them.
"""

from __future__ import annotations

from functools import cached_property

from agentrl.plan.figure import Figure, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.communication import TrainingCommunication
from agentrl.plan.ledger.flops import Flops
from agentrl.plan.ledger.given import Given

_MFU = "Chowdhery et al. 2022, PaLM, appendix B (model FLOPs utilization)"


def compute_s(name: str, flops: Quantity, gpus: Quantity, peak: Quantity, mfu: Quantity) -> Figure:
    """Seconds of compute-bound work at a share of the peak rate."""
    value = flops.value / (gpus.value * peak.value * mfu.value)
    formula = f"{flops.name} / ({gpus.name} x {peak.name} x {mfu.name})"
    return Figure(name, value, "s", formula, (flops, gpus, peak, mfu), _MFU)


class Training:
    def __init__(self, plan: PlanInput, gpus: int) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.flops = Flops(plan)
        self._gpus = self.given.gpus("trainer_gpus", gpus)

    @cached_property
    def forward(self) -> Figure:
        given = self.given
        return compute_s("forward_s", self.flops.forward, self._gpus, given.peak_flops, given.assumed("forward_mfu"))

    @cached_property
    def update(self) -> Figure:
        given = self.given
        return compute_s("train_s", self.flops.train, self._gpus, given.peak_flops, given.assumed("train_mfu"))

    @cached_property
    def communication(self) -> TrainingCommunication:
        return TrainingCommunication(self.plan, int(self._gpus.value))

    @cached_property
    def bubble(self) -> Figure:
        return self.communication.bubble(total("training_compute_s", "s", (self.forward, self.update)))

    @cached_property
    def exposed(self) -> tuple[Figure, ...]:
        """What the ranks of the trainer add to the compute, where the plan counts it."""
        return (self.communication.exposed, self.bubble) if self.plan.assume.count_communication else ()

    @cached_property
    def total(self) -> Figure:
        return total("training_s", "s", (self.forward, self.update, *self.exposed))
