"""Which form to run and how to divide the GPUs. Called by the CLI and the report.

Invariant: every form is either ranked with its step time or refused with a reason; the chosen one is ranked. When none
can run, the error names the field and the nearest cluster that would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.advice import advice
from agentrl.plan.choice.agentic import (
    ResidencyChoice,
    SandboxChoice,
    WindowChoice,
    residency_choice,
    sandbox_choice,
    window_choice,
)
from agentrl.plan.choice.barrier import speedup
from agentrl.plan.choice.forms import Form, Overlap
from agentrl.plan.choice.nearest import nearest_cluster
from agentrl.plan.choice.options import Option, Refused, option_of
from agentrl.plan.choice.phases import syncs_of_step
from agentrl.plan.choice.pretraining import Pretraining, pretraining
from agentrl.plan.choice.reliability import Reliability, reliability
from agentrl.plan.choice.split import work_ratio
from agentrl.plan.choice.staleness import Cut, Staleness
from agentrl.plan.choice.synchronization import SyncCost, sync_cost
from agentrl.plan.choice.uncounted import Uncounted, uncounted, uncounted_notes
from agentrl.plan.choice.waiting import Waiting, waiting
from agentrl.plan.figure import Figure, show
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout, Sandboxes, Training

WORTH = 1.3
"""A form that trains on older samples has to be this much faster than one that does not to be chosen over it."""
EVEN = 1.05
"""Among forms with lag, and among those without, a simpler one is chosen when it is this close to the fastest."""

SIMPLEST_FIRST = (Form.COLOCATED, Form.SEPARATE_SYNC, Form.ONE_STEP, Form.COLOCATED_ASYNC, Form.ASYNC)


@dataclass(frozen=True)
class Choice:
    chosen: Option
    options: tuple[Option, ...]
    """Of the forms that fit, fastest first."""
    refused: tuple[Refused, ...]
    reasons: tuple[str, ...]
    """Why the chosen form, then what else the plan should set, in sentences."""
    speedups: tuple[Figure, ...]
    """Of each option against the simplest that fits."""
    by_time: Figure
    """Generation to training in seconds on all GPUs: what the split follows."""
    by_flops: Figure
    """The same in FLOPs, which points the other way."""
    streaming: Option | None
    """Whose staleness is shown: the chosen form if it streams, else `async`, which the lag limit is about, else what
    else streams and fits. The others have one lag, 0 or 1."""
    sync: SyncCost
    reliability: Reliability
    sandboxes: SandboxChoice | None
    residency: ResidencyChoice | None
    window: WindowChoice | None
    uncounted: Uncounted | None
    """Of the chosen form."""
    waiting: Waiting
    pretraining: Pretraining

    @property
    def staleness(self) -> Staleness | None:
        return self.streaming.staleness if self.streaming else None

    def option(self, form: Form) -> Option | None:
        return next((option for option in self.options if option.form is form), None)

    def figures(self) -> Iterator[Figure]:
        """All figures of the choice, for tables and for `explain`."""
        for option in self.options:
            yield from (option.step_s, option.mfu, option.usd)
        yield from (*self.speedups, self.by_time, self.by_flops)
        for part in (self.staleness, self.sync, self.reliability, self.sandboxes, self.residency, self.window,
                     self.uncounted, self.waiting, self.pretraining):  # fmt: skip
            yield from figures_of(part)


PARTS = (
    Staleness, Cut, SyncCost, Reliability, SandboxChoice, ResidencyChoice, WindowChoice, Uncounted, Waiting,
    Pretraining,
)  # fmt: skip


def figures_of(part: object) -> Iterator[Figure]:
    """The figures among the fields of a part and of its own parts, in their order; none of a part that is not there."""
    if isinstance(part, Figure):
        yield part
    elif isinstance(part, PARTS):
        for field in fields(part):
            yield from figures_of(getattr(part, field.name))


def choose(plan: PlanInput) -> Choice:
    """Ranks the forms that fit and picks one, or the plan's own. ConfigError when none fits, or the plan's does not."""
    found = [option_of(plan, form) for form in SIMPLEST_FIRST]
    fit = [option for option in found if isinstance(option, Option)]
    refused = tuple(option for option in found if isinstance(option, Refused))
    if not fit:
        nearest = nearest_cluster(plan)
        if nearest is None:
            raise ConfigError(refused[0].why)
        raise ConfigError(
            f"cluster.gpus: {plan.cluster.gpus} {plan.gpu.name} run {plan.shape.name} in no form "
            f"({refused[0].why}); nearest: {nearest}"
        )
    chosen = _own(plan, fit, refused) or _simplest_worth(fit)
    # Of separate pools: the colocated engine may not fit where a separate one does.
    whole = Rollout(plan, plan.cluster.gpus, colocated=False)
    training = Training(plan, plan.cluster.gpus)
    has_environment = plan.workload.environment_s.mean > 0
    has_waiting_kv = plan.workload.turns > 1 and not plan.rollout.kv_offload
    sync = sync_cost(plan, chosen.step_s, chosen.sync_s, syncs_of_step(plan, chosen.form))
    saving = reliability(plan, chosen.step_s, chosen.trainer_gpus)
    sandboxes = sandbox_choice(Sandboxes(plan, chosen.rollout)) if has_environment else None
    residency = residency_choice(chosen.rollout) if has_waiting_kv else None
    queues = has_environment and plan.workload.turn_generation_s is None
    window = window_choice(chosen.rollout) if queues else None
    left_out = uncounted(plan, chosen.rollout, chosen.trainer_gpus)
    streaming = next((option for option in (chosen, *reversed(fit)) if option.staleness), None)
    pipeline = next((option for option in fit if option.form is Form.ONE_STEP), None)
    ranked = tuple(sorted(fit, key=lambda option: option.step_s.value))
    return Choice(
        chosen=chosen,
        options=ranked,
        refused=refused,
        reasons=(
            *_reasons(plan, whole, chosen, fit),
            *(uncounted_notes(left_out) if left_out else ()),
            *advice(chosen.step_s, sync, saving, sandboxes, residency, window),
        ),
        speedups=tuple(_speedup(fit[0], option) for option in fit),
        by_time=work_ratio(whole.generation, training.total, "generation_to_training_s"),
        by_flops=work_ratio(training.flops.decode, training.flops.train, "generation_to_training_flops"),
        streaming=streaming,
        sync=sync,
        reliability=saving,
        sandboxes=sandboxes,
        residency=residency,
        window=window,
        uncounted=left_out,
        waiting=waiting(plan, whole, pipeline, streaming),
        pretraining=pretraining(plan, training.flops.step, saving.run_s),
    )


def _own(plan: PlanInput, fit: Sequence[Option], refused: Sequence[Refused]) -> Option | None:
    """The form that the plan asks for; None when it leaves the choice to us."""
    if plan.form.kind == "auto":
        return None
    form = Form(plan.form.kind)
    for option in refused:
        if option.form is form:
            raise ConfigError(
                f"form.kind: {form} cannot run here ({option.why}); nearest: {_simplest_worth(fit).form.value!r}"
            )
    return next(option for option in fit if option.form is form)


def _simplest_worth(fit: Sequence[Option]) -> Option:
    """The simplest that is nearly the fastest of those without lag, unless those with lag are `WORTH` times faster."""
    best = min(option.step_s.value for option in fit)
    enough = any(option.step_s.value < WORTH * best for option in fit if not _has_lag(option))
    alike = [option for option in fit if _has_lag(option) is not enough]
    fastest = min(option.step_s.value for option in alike)
    return next(option for option in alike if option.step_s.value < EVEN * fastest)


def _has_lag(option: Option) -> bool:
    return option.form.overlap is not Overlap.NONE


def _speedup(base: Option, option: Option) -> Figure:
    figure = speedup(base.step_s, option.step_s)
    return Figure(f"speedup.{option.form}", figure.value, "x", figure.formula, figure.inputs)


def _reasons(plan: PlanInput, whole: Rollout, chosen: Option, fit: Sequence[Option]) -> tuple[str, ...]:
    verb = "waits" if chosen.form.waits_for_tail else "does not wait"
    found = [f"the tail is {100 * whole.tail_share.value:.0f} % of generation, which the step {verb} for"]
    for option in fit:
        if option is chosen:
            continue
        ratio = option.step_s.value / chosen.step_s.value
        how = f"{ratio:.2f} x the time"
        if ratio < 1:
            enough = EVEN if _has_lag(option) is _has_lag(chosen) else WORTH
            how = f"{1 / ratio:.3f} x as fast, and is worth it from {enough:g} x"
        found.append(f"{option.label} takes {option.step_s.value:,.0f} s, {how}")
        found += [note for note in option.notes if "waits" in note]
    target, generation = plan.workload.rollout_target_s, chosen.rollout.generation
    if target is not None and generation.value > target:
        found.append(
            f"generation takes {show(generation)} here, over workload.rollout_target_s = {target:g}"
            + ("" if plan.workload.turn_generation_s is None else ", for which the sandboxes are counted")
        )
    if plan.form.kind != "auto":
        found.append(f"form.kind = {plan.form.kind!r} was asked for")
    return (*found, *chosen.notes)
