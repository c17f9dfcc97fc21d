"""The forms of a step and how long it takes in each. Called by `split` and `choose`.

Two questions make a form: where the roles run, and who waits for whom. Placement does not answer the second, which is
why separate pools that take turns are a form of their own, and the slowest.
"""

from __future__ import annotations

from enum import StrEnum

from agentrl.plan.figure import Figure, Quantity


class Overlap(StrEnum):
    """Who waits for whom."""

    NONE = "none"
    """Training starts when the batch is complete, generation when the weights are new."""
    BATCH = "batch"
    """The next batch is generated while this one is trained: lag 1."""
    STREAM = "stream"
    """Generation never stops for a batch; training takes what is ready."""


class Form(StrEnum):
    COLOCATED = "colocated"
    COLOCATED_ASYNC = "colocated_async"
    """One pool that stops generating when a batch is complete and continues the rest after the update."""
    SEPARATE_SYNC = "separate_sync"
    ONE_STEP = "one_step"
    ASYNC = "async"

    @property
    def separate(self) -> bool:
        """Generation and training have GPUs of their own."""
        return self in (Form.SEPARATE_SYNC, Form.ONE_STEP, Form.ASYNC)

    @property
    def overlap(self) -> Overlap:
        if self in (Form.ASYNC, Form.COLOCATED_ASYNC):
            return Overlap.STREAM
        return Overlap.BATCH if self is Form.ONE_STEP else Overlap.NONE

    @property
    def waits_for_tail(self) -> bool:
        """A step includes the longest response."""
        return self.overlap is not Overlap.STREAM


def generation_s(throughput_s: Quantity, tail_s: Quantity) -> Figure:
    """Until the longest response is complete."""
    return Figure(
        "generation_s",
        throughput_s.value + tail_s.value,
        "s",
        f"{throughput_s.name} + {tail_s.name}",
        (throughput_s, tail_s),
    )


def step_s(
    form: Form, throughput_s: Quantity, tail_s: Quantity, training_s: Quantity, sync_s: Quantity, other_s: Quantity
) -> Figure:
    """Seconds of a step. `training_s` holds all passes over the batch.

    `other_s` is what each form adds: moving memory between the roles when colocated, prefilling interrupted
    responses again when they continue.
    """
    generating = generation_s(throughput_s, tail_s) if form.waits_for_tail else throughput_s
    rest = (training_s, sync_s, other_s)
    added = sync_s.value + other_s.value
    if form.separate and form.overlap is not Overlap.NONE:
        value = max(generating.value, training_s.value) + added
        formula = f"max({generating.name}, {training_s.name}) + {sync_s.name} + {other_s.name}"
    else:
        value = generating.value + training_s.value + added
        formula = " + ".join((generating.name, *(part.name for part in rest)))
    return Figure(f"step_s.{form}", value, "s", formula, (generating, *rest))
