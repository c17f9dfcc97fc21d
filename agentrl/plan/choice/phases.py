"""The ledger's phases on any number of GPUs, as `split` asks for them. Made by `options`.

Invariant: each side's concurrency, decode time and memory are those of its own GPUs, never a share of the whole.
"""

from __future__ import annotations

import math

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.correction import continuation_flops, running_sequences
from agentrl.plan.choice.dropping import MOST_DROPPED, dropped_share
from agentrl.plan.choice.forms import Form
from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout, Sync, TrainerMemory, Training
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.training import compute_s

_LONGEST = "[workload] 1 - 1/episodes quantile"


class PlanPhases:
    """Of separate pools; the colocated forms need no split."""

    def __init__(self, plan: PlanInput, form: Form) -> None:
        self.plan = plan
        self.form = form
        self._rollouts: dict[int, Rollout] = {}
        self._dropped: dict[int, Figure] = {}

    def rollout(self, gpus: int) -> Rollout:
        if gpus not in self._rollouts:
            self._rollouts[gpus] = Rollout(self.plan, gpus, colocated=False)
        return self._rollouts[gpus]

    def throughput_s(self, gpus: int) -> Figure:
        return streamed_throughput_s(self.plan, self.form, self.rollout(gpus), self.dropped_share(gpus))

    def dropped_share(self, gpus: int) -> Figure | None:
        """What the lag limit throws away when the trainer has all other GPUs; None where none does."""
        if not drops(self.plan, self.form):
            return None
        if gpus not in self._dropped:
            training, sync = self.training_s(self.plan.cluster.gpus - gpus), self.sync_s(gpus)
            syncs = syncs_of_step(self.plan, self.form)
            self._dropped[gpus] = dropped_share(self.plan, self.rollout(gpus), training, sync, syncs)
        return self._dropped[gpus]

    def tail_s(self, gpus: int) -> Figure:
        return self.rollout(gpus).tail

    def training_s(self, gpus: int) -> Figure:
        return Training(self.plan, gpus).total

    def sync_s(self, rollout_gpus: int) -> Figure:
        instances = int(self.rollout(rollout_gpus).instances.value)
        return syncs_of_step_s(self.plan, self.form, Sync(self.plan, instances).chosen(colocated=False), "step_sync_s")

    def problems(self, rollout_gpus: int, trainer_gpus: int) -> tuple[str, ...]:
        try:
            TrainerMemory(self.plan, trainer_gpus).check()
        except ConfigError as error:
            return (error.message,)
        dropped = self.dropped_share(rollout_gpus)
        if dropped is not None and dropped.value >= MOST_DROPPED:
            return (
                f"form.max_lag: {self.plan.form.max_lag} drops over {100 * MOST_DROPPED:.0f} % of what {self.form} "
                "samples; raise it, or set form.at_limit = 'partial'",
            )
        return ()


def drops(plan: PlanInput, form: Form) -> bool:
    """A lag limit throws samples away."""
    return form is Form.ASYNC and plan.form.at_limit == "drop"


def syncs_of_step(plan: PlanInput, form: Form) -> Figure:
    """Weight syncs of a step: one, but every `form.sync_every` updates where generation never stops for a batch."""
    if form is not Form.ASYNC:
        return Figure("syncs", 1.0, "", "1: after the step's last update", ())
    updates = Input("updates", plan.trainer.updates, source="[trainer]")
    every = Input("sync_every", plan.form.sync_every, source="[form]")
    return Figure("syncs", updates.value / every.value, "", f"{updates.name} / {every.name}", (updates, every))


def syncs_of_step_s(plan: PlanInput, form: Form, one_s: Figure, name: str) -> Figure:
    """What each sync of a step takes, for all of them."""
    count = syncs_of_step(plan, form)
    return Figure(name, count.value * one_s.value, "s", f"{count.name} x {one_s.name}", (count, one_s))


def streamed_throughput_s(plan: PlanInput, form: Form, rollout: Rollout, dropped: Quantity | None = None) -> Figure:
    """Generation without the tail, with what the lag limit adds to it. Only `async` has one: `colocated_async` always
    cuts what runs and continues it, and the other forms have one lag for all samples."""
    if form is not Form.ASYNC:
        return rollout.throughput
    if plan.form.at_limit == "wait":
        return paced_throughput_s(plan, form, rollout)
    if dropped is not None:
        return repeated_throughput_s(rollout.throughput, dropped)
    continued = syncs_of_step_s(plan, form, continuation_s(plan, rollout), "step_continuation_s")
    return total("interrupted_throughput_s", "s", (rollout.throughput, continued))


def waiting_s(plan: PlanInput, form: Form, rollout: Rollout, max_lag: int) -> Figure:
    """The shortest step whose longest episode is within the limit.

    An episode may take `max_lag` sync intervals, less the half that has passed, on average, when it begins. A pool that
    waits for T seconds a step fills throughput / T of its places, and its decode step falls from that of full instances
    towards that of the last sequence, its waits towards none: T = (longest x pace(T) + environment + waits(T)) / room
    is a quadratic equation.
    """
    work, syncs, throughput = plan.workload, syncs_of_step(plan, form), rollout.throughput
    limit = Input("max_lag", max_lag, "versions", "[form]")
    tokens = Input("longest_tokens", work.response_tokens.longest_sum(work.turns, work.episodes), "tokens", _LONGEST)
    longest_s = work.environment_s.longest_sum(work.turns, work.episodes)
    environment = Input("longest_environment_s", longest_s, "s", _LONGEST)
    room, idle, full = (max_lag - 0.5) / syncs.value, rollout.tail_step, rollout.decode_step
    waits = rollout.waits
    linear = (tokens.value * idle.value + environment.value) / room
    square = (tokens.value * max(full.value - idle.value, 0.0) + waits.value) * throughput.value / room
    return Figure(
        "waiting_s",
        (linear + math.sqrt(linear**2 + 4 * square)) / 2,
        "s",
        f"T = ({tokens.name} x pace + {environment.name} + {waits.name} x {throughput.name} / T) x {syncs.name} / "
        f"({limit.name} - 1/2), "
        f"pace = {idle.name} + ({full.name} - {idle.name}) x {throughput.name} / T",
        (tokens, environment, waits, syncs, limit, idle, full, throughput),
        "at_limit = 'wait': the trainer waits rather than let a sample exceed the limit",
    )


def paced_throughput_s(plan: PlanInput, form: Form, rollout: Rollout) -> Figure:
    throughput, waiting = rollout.throughput, waiting_s(plan, form, rollout, plan.form.max_lag)
    value = max(throughput.value, waiting.value)
    formula = f"max({throughput.name}, {waiting.name})"
    return Figure("paced_throughput_s", value, "s", formula, (throughput, waiting))


def repeated_throughput_s(throughput: Quantity, dropped: Quantity) -> Figure:
    """A batch is a number of samples: for each that is dropped another one of any length is sampled."""
    return Figure(
        "repeated_throughput_s",
        throughput.value / (1 - dropped.value),
        "s",
        f"{throughput.name} / (1 - {dropped.name})",
        (throughput, dropped),
        "at_limit = 'drop'",
    )


def continuation_s(plan: PlanInput, rollout: Rollout) -> Figure:
    """Of one sync that interrupts: all running sequences prefill what they have so far, on the rollout's GPUs."""
    given = Given(plan)
    running = running_sequences(rollout.instances, rollout.decoding)
    flops = continuation_flops(running, rollout.context, given.active_parameters)
    gpus = given.gpus("rollout_gpus", rollout.gpus)
    return compute_s("continuation_s", flops, gpus, given.peak_flops, given.assumed("prefill_mfu"))
