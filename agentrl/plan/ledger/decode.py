"""Seconds of a decode step and of the rollout made of them. Called by `rollout`.

Decoding reads all weights that the batch touches and the KV of every sequence, once a step, and is bound by memory:
the roofline is bytes over bandwidth. Invariant: a step never takes less than its FLOPs need at full rate.
"""

from __future__ import annotations

import math

from agentrl.plan.figure import Figure, Quantity

_ROOFLINE = "Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2"
_TAIL = "Kimi Team 2025, Kimi k1.5, section 2.6.2 (partial rollouts)"
_AREAL = "Fu et al. 2025, AReaL: A Large-Scale Asynchronous RL System"


def decode_step_s(
    weights: Quantity, held: Quantity, context: Quantity, per_token: Quantity, gpus: Quantity, rate: Quantity,
    efficiency: Quantity, flops: Quantity | None = None, peak: Quantity | None = None,
) -> Figure:  # fmt: skip
    """One token for each sequence of an instance; the larger of its bytes and its FLOPs (both spread over its GPUs)."""
    read = weights.value + held.value * context.value * per_token.value
    value = read / (gpus.value * rate.value * efficiency.value)
    formula = (
        f"({weights.name} + {held.name} x {context.name} x {per_token.name}) / "
        f"({gpus.name} x {rate.name} x {efficiency.name})"
    )
    inputs = (weights, held, context, per_token, gpus, rate, efficiency)
    if flops is None or peak is None:
        return Figure("decode_step_s", value, "s", formula, inputs, _ROOFLINE)
    bound = held.value * flops.value / (gpus.value * peak.value)
    formula = f"max({formula}, {held.name} x {flops.name} / ({gpus.name} x {peak.name}))"
    return Figure("decode_step_s", max(value, bound), "s", formula, (*inputs, flops, peak), _ROOFLINE)


def full_memory_step_s(share: Quantity, gpu_memory: Quantity, rate: Quantity, efficiency: Quantity) -> Figure:
    """A decode step with the KV pool full: it reads the whole of the memory it was given, whatever the model."""
    value = share.value * gpu_memory.value / (rate.value * efficiency.value)
    formula = f"{share.name} x {gpu_memory.name} / ({rate.name} x {efficiency.name})"
    return Figure("full_memory_step_s", value, "s", formula, (share, gpu_memory, rate, efficiency), _ROOFLINE)


def tail_step_s(weights: Quantity, gpus: Quantity, rate: Quantity, efficiency: Quantity) -> Figure:
    """A decode step of the last sequences: hardly more than the weights is read (with experts, at most those)."""
    value = weights.value / (gpus.value * rate.value * efficiency.value)
    formula = f"{weights.name} / ({gpus.name} x {rate.name} x {efficiency.name})"
    return Figure("tail_step_s", value, "s", formula, (weights, gpus, rate, efficiency), _ROOFLINE)


def sequence_s(read: Quantity, gpus: Quantity, rate: Quantity, efficiency: Quantity) -> Figure:
    """What one more sequence adds to a decode step."""
    value = read.value / (gpus.value * rate.value * efficiency.value)
    formula = f"{read.name} / ({gpus.name} x {rate.name} x {efficiency.name})"
    return Figure("sequence_s", value, "s", formula, (read, gpus, rate, efficiency), _ROOFLINE)


def measured_generating_share(turn: Quantity, environment: Quantity) -> Figure:
    """Share of an episode's time in which it decodes, from the seconds of a turn."""
    value = turn.value / (turn.value + environment.value)
    formula = f"{turn.name} / ({turn.name} + {environment.name})"
    return Figure("generating_share", value, "share", formula, (turn, environment))


def generating_share(
    in_flight: Quantity, tokens: Quantity, weights: Quantity, sequence: Quantity, environment: Quantity,
    prefill: Quantity,
) -> Figure:  # fmt: skip
    """The same where a turn takes as long as the batch makes it, and the batch is whoever is in a turn.

    The batch n of an instance solves n = in flight x turn / (turn + environment) where a turn takes
    tokens x (weights + n x sequence) + n x prefill: decoding stands still for the prefill of each turn that begins.
    """
    slope, base = tokens.value * sequence.value + prefill.value, tokens.value * weights.value
    linear = base + environment.value - in_flight.value * slope
    batch = (math.sqrt(linear**2 + 4 * slope * in_flight.value * base) - linear) / (2 * slope)
    turn = f"{tokens.name} x ({weights.name} + batch x {sequence.name}) + batch x {prefill.name}"
    formula = (
        f"batch / {in_flight.name} where batch = {in_flight.name} x turn / (turn + {environment.name}), turn = {turn}"
    )
    inputs = (in_flight, tokens, weights, sequence, environment, prefill)
    return Figure("generating_share", batch / in_flight.value, "share", formula, inputs)


def instance_tokens_per_s(held: Quantity, step: Quantity) -> Figure:
    value = held.value / step.value
    return Figure("instance_tokens_per_s", value, "tokens/s", f"{held.name} / {step.name}", (held, step), _ROOFLINE)


def decode_busy_s(sampled: Quantity, instances: Quantity, rate: Quantity) -> Figure:
    """All sampled tokens at the full instances' rate."""
    value = sampled.value / (instances.value * rate.value)
    formula = f"{sampled.name} / ({instances.name} x {rate.name})"
    return Figure("decode_busy_s", value, "s", formula, (sampled, instances, rate), _ROOFLINE)


def throughput_s(busy: Quantity, prefill: Quantity, episode: Quantity) -> Figure:
    """The part of the rollout that more GPUs shorten, down to the time of one average episode."""
    value = max(busy.value + prefill.value, episode.value)
    formula = f"max({busy.name} + {prefill.name}, {episode.name})"
    return Figure("throughput_s", value, "s", formula, (busy, prefill, episode))


def tail_s(
    longest: Quantity, mean: Quantity, step: Quantity, environment: Quantity, drain: Quantity | None = None
) -> Figure:
    """What the longest episode takes beyond an average one, nearly alone; no GPU more makes it shorter."""
    value = max(longest.value - mean.value, 0.0) * step.value + environment.value
    formula = f"({longest.name} - {mean.name}) x {step.name} + {environment.name}"
    inputs = (longest, mean, step, environment)
    if drain is None:
        return Figure("tail_s", value, "s", formula, inputs, _TAIL)
    return Figure("tail_s", value + drain.value, "s", f"{formula} + {drain.name}", (*inputs, drain), _TAIL)


def tail_share(throughput: Quantity, tail: Quantity) -> Figure:
    """f: the share of the rollout that is tail."""
    both = throughput.value + tail.value
    formula = f"{tail.name} / ({throughput.name} + {tail.name})"
    return Figure("tail_share", tail.value / both if both else 0.0, "share", formula, (throughput, tail))


def tail_free_gain(share: Quantity, generation: Quantity, training: Quantity) -> Figure:
    """How much faster a step is that waits for no tail: the bound of what an asynchronous form gains."""
    value = 1 / (1 - share.value * generation.value / (generation.value + training.value))
    formula = f"1 / (1 - {share.name} x {generation.name} / ({generation.name} + {training.name}))"
    return Figure("tail_free_gain", value, "x", formula, (share, generation, training), _AREAL)


def tail_at_share(throughput_s: Quantity, share: Quantity) -> Figure:
    """The tail that makes up this share of generation, for asking how a form bears a longer one."""
    return Figure(
        f"tail_at_{share.name}_s",
        throughput_s.value * share.value / (1 - share.value),
        "s",
        f"{throughput_s.name} x {share.name} / (1 - {share.name})",
        (throughput_s, share),
    )
