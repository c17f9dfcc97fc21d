"""What the ranks send each other, beside the time that the assumed efficiencies leave for it. Called by `choose`.

Without `assume.count_communication` it is in no step time: a measured efficiency has it inside. That holds only as far
as the seconds that an efficiency takes beyond the work at the full rate; what is more cannot be inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.plan.figure import Figure, Quantity, show, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout, Training

WORTH_SAYING = 0.1
"""Share of a phase."""


@dataclass(frozen=True)
class Uncounted:
    training_s: Figure
    """That do not hide under compute, and a pipeline's bubble."""
    training_room_s: Figure
    """That the assumed efficiencies leave."""
    rollout_s: Figure
    rollout_room_s: Figure


def uncounted(plan: PlanInput, rollout: Rollout, trainer_gpus: int) -> Uncounted | None:
    """None when the plan counts it, or no rank has another to send to."""
    training = Training(plan, trainer_gpus)
    assumed = rollout.given.assumed
    sent = total("training_uncounted_s", "s", (training.communication.exposed, training.bubble))
    received = total("rollout_uncounted_s", "s", (rollout.communication.exposed,))
    if plan.assume.count_communication or sent.value + received.value == 0:
        return None
    of_training = ((training.forward, assumed("forward_mfu")), (training.update, assumed("train_mfu")))
    of_rollout = (
        (rollout.decode_busy, assumed("memory_efficiency")),
        (rollout.prefill.seconds, assumed("prefill_mfu")),
    )
    return Uncounted(sent, _room("training_room_s", *of_training), received, _room("rollout_room_s", *of_rollout))


def uncounted_notes(found: Uncounted) -> tuple[str, ...]:
    """A sentence for each phase that it is a good part of."""
    sides = (
        ("the trainer's", found.training_s, found.training_room_s, "forward_mfu and train_mfu"),
        ("the engines'", found.rollout_s, found.rollout_room_s, "memory_efficiency and prefill_mfu"),
    )
    return tuple(_note(*side) for side in sides if side[1].value > WORTH_SAYING * _phase_s(side[2]))


def _note(whose: str, sent: Figure, room: Figure, efficiencies: str) -> str:
    said = f"not in these times: {show(sent)} a step in which {whose} ranks send to each other; {efficiencies} "
    if sent.value <= room.value:
        return f"{said}have room for {show(room)} (assume.count_communication = true adds it)"
    return (
        f"{said}have room for {show(room)} only, so that part takes longer than it says here: set "
        "assume.count_communication = true, or a measured assume.communication_overlap with it"
    )


def _phase_s(room: Figure) -> float:
    return sum(part.value for part in room.inputs if part.unit == "s")


def _room(name: str, *parts: tuple[Figure, Quantity]) -> Figure:
    value = sum((1 - efficiency.value) * seconds.value for seconds, efficiency in parts)
    formula = " + ".join(f"(1 - {efficiency.name}) x {seconds.name}" for seconds, efficiency in parts)
    return Figure(name, value, "s", formula, tuple(quantity for part in parts for quantity in part))
