"""Who waits for whom, in closed forms: what a barrier leaves unused, and what overlap gives back. Called by `choose`.

Of the machines' ideal: constant durations, so that the simulator's numbers lie a little above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.plan.choice.barrier import (
    barrier_utilization,
    length_utilization,
    pipelined_s,
    queue_load,
    sequential_s,
    speedup,
)
from agentrl.plan.choice.options import Option
from agentrl.plan.choice.split import rollout_gpus_by_time
from agentrl.plan.choice.staleness import episode_lengths, typical_lag
from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Rollout, Training
from agentrl.plan.ledger.sandboxes import versions_spanned


@dataclass(frozen=True)
class Waiting:
    length_utilization: Figure
    """Useful share of the decode steps when all sequences start together and wait for the longest."""
    rollout_gpus_by_time: Figure
    """The split if both sides scaled; the tail does not, so that the best splits generate on fewer."""
    pools_utilization: Figure | None
    """Of two pools that wait for each other each step, at the pipeline's split."""
    in_turns_s: Figure | None
    """The run's batches through both pools, one after the other; then overlapped; then what that gains."""
    overlapped_s: Figure | None
    overlap_gain: Figure | None
    trainer_load: Figure | None
    """rho of the queue between the pools of `async`."""
    typical_lag: Figure | None
    """Of a group that takes its usual time, in the streaming form."""
    versions_spanned: Figure | None


def waiting(plan: PlanInput, whole: Rollout, one_step: Option | None, streaming: Option | None) -> Waiting:
    longest = Input("longest_sampled_tokens", plan.workload.response_tokens.longest_sum(
        plan.workload.turns, plan.workload.episodes), "tokens", "[workload] 1 - 1/episodes quantile")  # fmt: skip
    mean = Input("mean_sampled_tokens", plan.workload.sampled_tokens, "tokens", "[workload]")
    training = Training(plan, plan.cluster.gpus).total
    by_time = rollout_gpus_by_time(whole.generation, training, whole.given.gpus("gpus", plan.cluster.gpus))
    found = Waiting(length_utilization(mean, longest), by_time, None, None, None, None, None, None, None)
    if one_step is not None and one_step.split is not None:
        generating = _of(one_step, one_step.rollout.generation)
        trained = _of(one_step, one_step.split.training_s)
        steps = Input("steps", plan.run.steps, "", "[run]")
        turns = replace(sequential_s(generating, trained, steps), name="in_turns_s")
        overlapped = replace(pipelined_s(generating, trained, steps), name="overlapped_s")
        found = replace(
            found,
            pools_utilization=replace(barrier_utilization((generating, trained)), name="pools_utilization"),
            in_turns_s=turns,
            overlapped_s=overlapped,
            overlap_gain=replace(speedup(turns, overlapped), name="overlap_gain", unit="x"),
        )
    if streaming is None or streaming.staleness is None:
        return found
    token, other, interval = streaming.staleness.lag_p50.inputs[:3]
    group = Input("group_longest_tokens", episode_lengths(plan.workload).longest(plan.workload.samples), "tokens",
                  "[workload] 1 - 1/samples quantile")  # fmt: skip
    after: Quantity = streaming.split.training_s if streaming.split else Input("wait_s", 0.0, "s", "taken at once")
    load = None
    if streaming.split is not None:
        arrivals, served = (
            _rate(name, _of(streaming, seconds))
            for name, seconds in (("batches_generated", streaming.split.throughput_s), ("batches_trained", after))
        )
        load = replace(queue_load(arrivals, served), name="trainer_load")
    return replace(
        found,
        trainer_load=load,
        typical_lag=typical_lag(_done("group_done_s", group, token, other), after, interval),
        versions_spanned=versions_spanned(_done("episode_done_s", mean, token, other), interval),
    )


def _of(option: Option, quantity: Quantity) -> Quantity:
    """Called after the form, since the ledger's tables have another value under the plain name."""
    return replace(quantity, name=f"{quantity.name}.{option.form}")


def _done(name: str, tokens: Quantity, token: Quantity, other: Quantity) -> Figure:
    """Seconds of an episode in the streaming form, whose pool is as full as its step leaves it."""
    value, formula = tokens.value * token.value + other.value, f"{tokens.name} x {token.name} + {other.name}"
    return Figure(name, value, "s", formula, (tokens, token, other))


def _rate(name: str, seconds: Quantity) -> Figure:
    return Figure(f"{name}_per_s", 1 / seconds.value, "/s", f"1 / {seconds.name}", (seconds,))
