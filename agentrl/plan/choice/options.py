"""Each form at its best on a plan's machines, or why it cannot run there. Called by `choose`.

Invariant: an option's split fits in memory on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.dropping import begins_within, pool_share, streamed_token_s, taken_after
from agentrl.plan.choice.forms import Form, Overlap, step_s
from agentrl.plan.choice.phases import PlanPhases, continuation_s, syncs_of_step, waiting_s
from agentrl.plan.choice.split import Split, fastest, split_at, split_curve
from agentrl.plan.choice.staleness import Staleness, beside_tokens, episode_lengths, staleness
from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Ledger, Rollout, build_ledger, step_mfu


@dataclass(frozen=True)
class Option:
    """One form at its best."""

    form: Form
    step_s: Figure
    mfu: Figure
    usd: Figure
    """All GPUs for one step."""
    sync_s: Quantity
    """Of all weight syncs of a step."""
    rollout: Rollout
    """On the GPUs that generate in this form."""
    trainer_gpus: int
    split: Split | None = None
    """None when colocated."""
    curve: tuple[Split, ...] = ()
    """All splits that were compared."""
    staleness: Staleness | None = None
    """None where all samples have the same lag: 0, or 1 in `one_step`."""
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[Figure, ...]:
        """Those of each side; none when colocated."""
        split = self.split
        if split is None:
            return ()
        formula = f"of the fastest of {len(self.curve)} splits that fit in memory" if len(self.curve) > 1 else "given"
        inputs = (split.throughput_s, split.tail_s, split.training_s, split.sync_s)
        return (
            Figure(f"rollout_gpus.{self.form}", split.rollout_gpus, "GPUs", formula, inputs, "choice.split"),
            Figure(f"trainer_gpus.{self.form}", split.trainer_gpus, "GPUs", formula, inputs, "choice.split"),
        )

    @property
    def label(self) -> str:
        return self.form.value if self.split is None else f"{self.form} {self.split.label}"


@dataclass(frozen=True)
class Refused:
    form: Form
    why: str


_NO_LIMIT = 1_000_000


def option_of(plan: PlanInput, form: Form) -> Option | Refused:
    if form.overlap is not Overlap.NONE and plan.form.max_lag == 0:
        return Refused(form, "form.max_lag: 0 lets no sample be older than the weights it trains; at least 1")
    try:
        best = _best(plan, form)
        if form is Form.ASYNC and plan.form.at_limit == "wait":
            best = replace(best, notes=(*best.notes, *_waiting(plan, best)))
        return replace(best, staleness=_staleness(plan, best)) if form.overlap is Overlap.STREAM else best
    except ConfigError as error:
        return Refused(form, error.message)


def _best(plan: PlanInput, form: Form) -> Option:
    return _separate(plan, form) if form.separate else _colocated(plan, form)


def _staleness(plan: PlanInput, option: Option) -> Staleness:
    """Of a streaming form, at its own pace."""
    syncs = syncs_of_step(plan, option.form)
    step, pace = option.step_s, option.rollout.decode_step
    busy: Quantity
    interval = Figure("sync_interval_s", step.value / syncs.value, "s", f"{step.name} / syncs", (step, syncs))
    work, split = plan.workload, option.split
    lengths = episode_lengths(work)
    if split is None:
        busy = option.rollout.throughput
        full = Input("pool_share", 1.0, "share", "all places are taken")
        pace = _paused("paused_token_s", pace, step, busy)
        other = _paused("paused_beside_tokens_s", beside_tokens(option.rollout, full), step, busy)
        at_once = Input("taken_after", 0, "versions", "the trainer begins when its batch is there")
        return staleness(lengths, pace, other, interval, None, at_once, work.samples)
    busy = option.rollout.throughput if plan.form.at_limit == "wait" else split.throughput_s
    share = pool_share(busy, step, option.sync_s)
    pace, after = streamed_token_s(option.rollout, share), taken_after(split.training_s, step)
    other = beside_tokens(option.rollout, share)
    begins = begins_within(option.rollout, pace, share, interval)
    return staleness(lengths, pace, other, interval, plan.form.max_lag, after, work.samples, begins)


def _paused(name: str, part: Quantity, step: Quantity, busy: Quantity) -> Figure:
    """What takes longer where generation pauses for training; an environment that ends meanwhile waits for it too."""
    value, formula = part.value * step.value / busy.value, f"{part.name} x {step.name} / {busy.name}"
    return Figure(name, value, "s", formula, (part, step, busy), "generation pauses for training")


def _colocated(plan: PlanInput, form: Form) -> Option:
    ledger = build_ledger(plan)
    rollout, sync = ledger.rollout, ledger.sync.chosen(colocated=True)
    other = ledger.switch
    if form is Form.COLOCATED_ASYNC:
        other = total("interruption_s", "s", (ledger.switch, continuation_s(plan, rollout)))
    step = step_s(form, rollout.throughput, rollout.tail, ledger.training.total, sync, other)
    return _option(ledger, form, step, sync, rollout, plan.cluster.gpus)


def _separate(plan: PlanInput, form: Form) -> Option:
    gpus, phases = plan.cluster.gpus, PlanPhases(plan, form)
    if plan.form.rollout_gpus is not None:
        curve: tuple[Split, ...] = (split_at(form, phases, plan.form.rollout_gpus, gpus - plan.form.rollout_gpus),)
    else:
        units = plan.rollout.gpus_per_instance, plan.trainer.model_parallel * plan.trainer.pipeline_parallel
        curve = split_curve(form, phases, gpus, rollout_unit=units[0], trainer_unit=units[1])
        if not curve:
            raise ConfigError(
                f"cluster.gpus: {gpus} cannot be divided into instances of {units[0]} GPUs and a trainer of multiples "
                f"of {units[1]}; at least {units[0] + units[1]}"
            )
    best = fastest(curve)
    if best is None:
        raise ConfigError(curve[0].problems[0])
    rollout = phases.rollout(best.rollout_gpus)
    option = _option(Ledger(plan), form, best.step_s, best.sync_s, rollout, best.trainer_gpus)
    return replace(option, split=best, curve=curve, notes=_notes(best, curve, plan.cluster.gpus_per_node))


def _option(ledger: Ledger, form: Form, step: Figure, sync: Quantity, rollout: Rollout, trainer_gpus: int) -> Option:
    mfu = step_mfu(ledger.flops.step, ledger.gpus, ledger.given.peak_flops, step)
    price = Input("gpu_usd_per_hour", ledger.plan.gpu_usd_per_hour, "$/h", "[cluster] or the table's example price")
    usd = Figure(
        f"gpu_usd.{form}",
        ledger.gpus.value * price.value * step.value / 3600,
        "$",
        f"gpus x {price.name} x {step.name} / 3600",
        (ledger.gpus, price, step),
    )
    return Option(form, step, replace(mfu, name=f"step_mfu.{form}"), usd, sync, rollout, trainer_gpus)


def _waiting(plan: PlanInput, option: Option) -> tuple[str, ...]:
    """What a limit that is waited for costs, when it does."""
    free = _best(_with_limit(plan, _NO_LIMIT), option.form)
    lost, generating = option.step_s.value - free.step_s.value, free.step_s.value - free.sync_s.value
    if lost < 1e-6 * free.step_s.value:
        return ()
    least = next(
        lag for lag in count(plan.form.max_lag + 1)
        if waiting_s(plan, option.form, free.rollout, lag).value <= generating
    )  # fmt: skip
    return (
        f"{option.form} waits {lost:,.0f} s a step for its longest episode so as not to exceed form.max_lag = "
        f"{plan.form.max_lag}; from {least} it would not, or with form.at_limit = 'partial'",
    )


def _with_limit(plan: PlanInput, max_lag: int) -> PlanInput:
    return plan.model_copy(update={"form": plan.form.model_copy(update={"max_lag": max_lag})})


def _notes(best: Split, curve: Iterable[Split], node: int) -> tuple[str, ...]:
    """What stood in the way of a faster split, and what whole nodes cost."""
    found = []
    unbound = min(curve, key=lambda split: split.step_s.value)
    if unbound.step_s.value < best.step_s.value:
        found.append(f"by time {unbound.label} would take {unbound.step_s.value:,.0f} s, but {unbound.problems[0]}")
    whole = fastest(split for split in curve if split.rollout_gpus % node == 0 and split.trainer_gpus % node == 0)
    if whole is not None and whole is not best:
        found.append(f"in whole nodes {whole.label} takes {whole.step_s.value:,.0f} s")
    return tuple(found)
