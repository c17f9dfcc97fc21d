"""The rollout of one step on a number of GPUs. Called by the ledger with all of them and by the choice with a part.

Invariant: more GPUs never make a rollout slower, and the tail never shorter.
"""

from __future__ import annotations

import math
from functools import cached_property

from agentrl.core.errors import ConfigError
from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import decode, kv
from agentrl.plan.ledger.communication import RolloutCommunication
from agentrl.plan.ledger.flight import Flight
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.prefill import Prefill
from agentrl.plan.ledger.tokens import Tokens

_LITTLE = "Little 1961, A Proof for the Queuing Formula L = lambda W"


class Rollout:
    def __init__(self, plan: PlanInput, gpus: int, *, colocated: bool = True) -> None:
        self.plan = plan
        self.gpus = gpus
        self.colocated = colocated
        self.given = Given(plan)
        self.tokens = Tokens(plan)

    @cached_property
    def instances(self) -> Figure:
        """Copies of the weights that decode independently."""
        gpus, size = self.given.gpus("rollout_gpus", self.gpus), self.given.instance_gpus
        if gpus.value < size.value:
            raise ConfigError(f"rollout.gpus_per_instance: {size.value:g} exceeds the rollout's {gpus.value:g} GPUs")
        return Figure("instances", gpus.value // size.value, "", f"floor({gpus.name} / {size.name})", (gpus, size))

    @cached_property
    def weight_bytes(self) -> Figure:
        """Of the engine's copy."""
        given = self.given
        size = given.rollout("weight_bytes", "B")
        value = given.parameters.value * size.value
        return Figure("engine_weight_bytes", value, "B", f"parameters x {size.name}", (given.parameters, size))

    @cached_property
    def kv_per_token(self) -> Figure:
        given = self.given
        return kv.kv_bytes_per_token(given.layers, given.kv_values, given.rollout("kv_bytes", "B"))

    @cached_property
    def kv_step(self) -> Figure:
        """If all episodes of the step were held at their full length."""
        return kv.kv_bytes("kv_step_bytes", self.tokens.all, self.kv_per_token)

    @cached_property
    def pool(self) -> Figure:
        given = self.given
        resident = given.rollout("resident_bytes", "B") if self.colocated else Input("no_resident_bytes", 0, "B")
        share = given.rollout("memory_share", "share")
        pool = kv.pool_bytes(given.instance_gpus, given.memory_bytes, share, resident, self.weight_bytes)
        needed = self.context.value * self.kv_per_token.value
        if pool.value < needed:
            usable = given.memory_bytes.value * share.value - resident.value
            least = math.ceil((self.weight_bytes.value + needed) / usable) if usable > 0 else math.inf
            raise ConfigError(
                f"rollout.gpus_per_instance: {given.instance_gpus.value:g} {self.plan.gpu.name} cannot hold "
                f"{self.plan.shape.name} ({self.weight_bytes.value / 1e9:.0f} GB) and the KV of one sequence; "
                f"at least {least}"
            )
        return pool

    @cached_property
    def context(self) -> Figure:
        """Tokens that a sequence in flight holds: its prompt and, on average, half of what it grows by."""
        given, work = self.given, self.plan.workload
        value = work.prompt_tokens.mean + (work.episode_tokens - work.prompt_tokens.mean) / 2
        formula = "prompt_tokens + (episode_tokens - prompt_tokens) / 2"
        return Figure("mean_context_tokens", value, "tokens", formula, (given.prompt_tokens, self.tokens.episode))

    @cached_property
    def capacity(self) -> Figure:
        """Sequences that an instance can hold."""
        return kv.concurrency(self.pool, self.context, self.kv_per_token)

    @cached_property
    def waves(self) -> Figure:
        return kv.waves(self.given.episodes, self.instances, self.capacity)

    @cached_property
    def flight(self) -> Flight:
        """Which of an instance's episodes are admitted, and what they do."""
        held = kv.kv_bytes("sequence_kv_bytes", self.context, self.kv_per_token)
        return Flight(self.plan, self.gpus, self.instances, self.capacity, self.pool, held, self.tail_step)

    @cached_property
    def in_flight(self) -> Figure:
        """Of all instances: the `rollout.concurrency` of a run."""
        each, instances = self.flight.in_flight, self.instances
        value = each.value * instances.value
        return Figure("in_flight", value, "episodes", f"{each.name} x {instances.name}", (each, instances))

    @cached_property
    def decoding(self) -> Figure:
        """Sequences that an instance decodes at once: its episodes that are not in their environment, if they fit."""
        limit, each, share = self.plan.rollout.max_sequences, self.flight.in_flight, self.flight.generating_share
        parts: list[Quantity] = [self.capacity, each, share]
        value = min(self.capacity.value, each.value * share.value)
        formula = f"instance_concurrency, {each.name} x generating_share"
        if limit is not None:
            parts.append(Input("rollout_max_sequences", limit, source="[rollout]"))
            value, formula = min(value, limit), f"{formula}, rollout_max_sequences"
        return Figure("decoding_sequences", value, "sequences", f"min({formula})", tuple(parts))

    @cached_property
    def _weights_read(self) -> Figure:
        """Bytes of the weights that a batch reads: with experts, those its tokens are sent to."""
        shape, size = self.plan.shape, self.given.rollout("weight_bytes", "B")
        touched = Input("touched_parameters", shape.touched_parameters(self.decoding.value), source=shape.source)
        value = touched.value * size.value
        return Figure("weights_read_bytes", value, "B", f"{touched.name} x {size.name}", (touched, size))

    @cached_property
    def decode_step(self) -> Figure:
        given = self.given
        flops = Figure("token_flops", 2 * given.active_parameters.value, "FLOP", "2 x active_parameters",
                       (given.active_parameters,))  # fmt: skip
        return decode.decode_step_s(
            self._weights_read, self.decoding, self.context, self.kv_per_token, given.instance_gpus, given.memory_rate,
            given.assumed("memory_efficiency"), flops, given.peak_flops,
        )  # fmt: skip

    @cached_property
    def full_memory_step(self) -> Figure:
        given = self.given
        share = given.rollout("memory_share", "share")
        return decode.full_memory_step_s(
            share, given.memory_bytes, given.memory_rate, given.assumed("memory_efficiency")
        )

    @cached_property
    def tail_step(self) -> Figure:
        given = self.given
        efficiency = given.assumed("memory_efficiency")
        return decode.tail_step_s(self.weight_bytes, given.instance_gpus, given.memory_rate, efficiency)

    @cached_property
    def instance_rate(self) -> Figure:
        return decode.instance_tokens_per_s(self.decoding, self.decode_step)

    @cached_property
    def communication(self) -> RolloutCommunication:
        return RolloutCommunication(self.plan, self.instances, self.decoding)

    @cached_property
    def decode_busy(self) -> Figure:
        busy = decode.decode_busy_s(self.tokens.sampled, self.instances, self.instance_rate)
        if not self.plan.assume.count_communication:
            return busy
        return total("decode_and_communication_s", "s", (busy, self.communication.exposed))

    @cached_property
    def prefill(self) -> Prefill:
        return self.flight.prefill

    @cached_property
    def undisturbed(self) -> Figure:
        """Wall clock of an average episode that waits for no place and for no other's prefill."""
        given, step = self.given, self.decode_step
        turn: Quantity = given.measured_turn_s()
        if self.plan.workload.turn_generation_s is None:
            value, formula = given.turn_tokens.value * step.value, f"{given.turn_tokens.name} x {step.name}"
            turn = Figure(f"turn_at_{step.name}", value, "s", formula, (given.turn_tokens, step))
        value = given.turns.value * (turn.value + given.environment_s.value)
        formula = f"turns x ({turn.name} + turn_environment_s)"
        return Figure("undisturbed_episode_s", value, "s", formula, (given.turns, turn, given.environment_s))

    @cached_property
    def mean_episode(self) -> Figure:
        """Wall clock of an average episode among the others that are in flight."""
        alone, flight = self.undisturbed, self.flight
        if not self._queues:
            return Figure("mean_episode_s", alone.value, "s", alone.name, (alone,))
        busy, prefill, each = self.decode_busy, self.prefill.seconds, flight.each
        queued = flight.in_flight.value * (busy.value + prefill.value) / each.value
        formula = f"max({alone.name}, {flight.in_flight.name} x ({busy.name} + {prefill.name}) / {each.name})"
        inputs = (alone, flight.in_flight, busy, prefill, each)
        return Figure("mean_episode_s", max(alone.value, queued), "s", formula, inputs, _LITTLE)

    @cached_property
    def waits(self) -> Figure:
        """What an average episode of a full pool waits for places and for others' prefill."""
        whole, alone = self.mean_episode, self.undisturbed
        return Figure("episode_waits_s", whole.value - alone.value, "s", f"{whole.name} - {alone.name}", (whole, alone))

    @property
    def _queues(self) -> bool:
        """Episodes come and go between engine and environment at a pace that the ledger itself computes."""
        return self.plan.workload.environment_s.mean > 0 and self.plan.workload.turn_generation_s is None

    @cached_property
    def throughput(self) -> Figure:
        return decode.throughput_s(self.decode_busy, self.prefill.seconds, self.mean_episode)

    @cached_property
    def tail(self) -> Figure:
        work, count = self.plan.workload, self.plan.workload.episodes
        longest = Input("longest_sampled_tokens", work.response_tokens.longest_sum(work.turns, count), "tokens",
                        "[workload] 1 - 1/episodes quantile")  # fmt: skip
        mean = Input("mean_sampled_tokens", work.sampled_tokens, "tokens", "[workload]")
        extra = work.environment_s.longest_sum(work.turns, count) - work.turns * work.environment_s.mean
        environment = Input("longest_environment_excess_s", max(extra, 0.0), "s", "[workload] 1 - 1/episodes quantile")
        return decode.tail_s(longest, mean, self.tail_step, environment, self._drain)

    @cached_property
    def _drain(self) -> Figure | None:
        """Where episodes are admitted one after the other, the last ones leave places empty: as they go from all in
        flight to none, an episode's time falls to the undisturbed one, half of which is lost. None in one wave."""
        each, held, alone = self.flight.each, self.flight.in_flight, self.undisturbed
        if not self._queues or each.value <= held.value:
            return None
        value = alone.value / 2 * min(1.0, each.value / held.value - 1)
        formula = f"{alone.name} / 2 x min(1, {each.name} / {held.name} - 1)"
        return Figure("drain_s", value, "s", formula, (alone, each, held))

    @cached_property
    def tail_share(self) -> Figure:
        return decode.tail_share(self.throughput, self.tail)

    @cached_property
    def generation(self) -> Figure:
        return total("generation_s", "s", (self.throughput, self.tail))
