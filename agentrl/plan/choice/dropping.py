"""What a lag limit throws away, and so what a stream has to sample again. Called by `phases` and `options`.

What is over the limit depends on the pace, the pace on how full the pool is, and that on what is sampled again.
Invariant: `dropped_share` is the smallest share that reproduces itself, which is where a run that begins with an empty
pool ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agentrl.plan.choice.staleness import beside_tokens, episode_lengths, group_lengths, over_limit
from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout

MOST_DROPPED = 0.9
"""A form that would drop more of what it samples than this is refused."""
FINENESS = 0.0025
"""Step of the search."""


def pool_share(busy_s: Quantity, step_s: Quantity, sync_s: Quantity) -> Figure:
    """How full the pool is: generation at full instances, over the step that something else makes longer."""
    value = min(1.0, busy_s.value / (step_s.value - sync_s.value))
    formula = f"min(1, {busy_s.name} / ({step_s.name} - {sync_s.name}))"
    return Figure("pool_share", value, "share", formula, (busy_s, step_s, sync_s))


def streamed_token_s(rollout: Rollout, share: Quantity) -> Figure:
    """A decode step of a pool that is partly full."""
    idle, full = rollout.tail_step, rollout.decode_step
    value = _pace(idle.value, full.value, share.value)
    formula = f"{idle.name} + ({full.name} - {idle.name}) x {share.name}"
    return Figure("streamed_token_s", value, "s", formula, (idle, full, share))


def taken_after(training_s: Quantity, step_s: Quantity) -> Figure:
    """Versions between the end of a sample and its training: the trainer is at the batch before."""
    value = min(1.0, training_s.value / step_s.value)
    formula = f"min(1, {training_s.name} / {step_s.name})"
    return Figure("taken_after", value, "versions", formula, (training_s, step_s))


def begins_within(rollout: Rollout, token_s: Quantity, share: Quantity, interval_s: Quantity) -> Figure:
    """Part of a sync interval in which samples begin. A limit hands in an interval's samples at its start; a pool that
    generates faster than the trainer takes has begun all of them before the next.

    After that, places fall empty in the time of a mean episode, and each costs only its share of a decode step:
    (1 - begins)^2 x idle / (2 x episode x full) of the interval's capacity is what stays unused.
    """
    mean = Input("mean_sampled_tokens", rollout.plan.workload.sampled_tokens, "tokens", "[workload]")
    idle, full = rollout.tail_step, rollout.decode_step
    value = _begins(mean.value * token_s.value / interval_s.value, share.value, idle.value / full.value)
    unused = f"2 x (1 - {share.name}) x {mean.name} x {token_s.name} / {interval_s.name} x {full.name} / {idle.name}"
    formula = f"1 - min(1, sqrt({unused}))"
    return Figure("begins_within", value, "share", formula, (share, mean, token_s, interval_s, full, idle))


def dropped_share(plan: PlanInput, rollout: Rollout, training_s: Quantity, sync_s: Quantity, syncs: Quantity) -> Figure:
    """Of the samples of an async step at a split; `MOST_DROPPED` when it is that or more."""
    found = next((share for share, over in _curve(plan, rollout, training_s, sync_s, syncs) if over <= share), None)
    return Figure(
        "dropped_sample_share",
        MOST_DROPPED if found is None else found,
        "share",
        f"smallest share that is over max_lag = {plan.form.max_lag} when the step is "
        f"max({rollout.throughput.name} / (1 - share), {training_s.name}) + {sync_s.name}",
        (rollout.throughput, rollout.tail_step, rollout.decode_step, training_s, sync_s),
        "agrees with the simulator as docs/planning.md says",
    )


def _curve(
    plan: PlanInput, rollout: Rollout, training_s: Quantity, sync_s: Quantity, syncs: Quantity
) -> Iterator[tuple[float, float]]:
    """A share that is sampled again, and the share that is then over the limit."""
    work, throughput, training = plan.workload, rollout.throughput.value, training_s.value
    idle, full = rollout.tail_step.value, rollout.decode_step.value
    _, longest = group_lengths(episode_lengths(work), work.samples)
    for share in np.arange(0.0, MOST_DROPPED, FINENESS).tolist():
        busy = throughput / (1 - share)
        step = max(busy, training) + sync_s.value
        used = min(1.0, busy / max(busy, training))
        pace = _pace(idle, full, used)
        other = beside_tokens(rollout, Input("pool_share", used, "share")).value
        lags = (longest * pace + other) * syncs.value / step + min(1.0, training / step)
        begins = _begins(work.sampled_tokens * pace * syncs.value / step, used, idle / full)
        yield share, float(over_limit(lags, plan.form.max_lag, begins).mean())


def _pace(idle_s: float, full_s: float, share: float) -> float:
    return idle_s + max(full_s - idle_s, 0.0) * share


def _begins(episode: float, share: float, idle: float) -> float:
    return 1 - min(1.0, math.sqrt(2 * (1 - share) * episode / idle))
