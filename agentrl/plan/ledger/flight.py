"""Episodes in flight: how many of a step are admitted at once, and what that makes of the KV cache and the batch.

Called by `rollout`. An episode is admitted when the dispatcher lets it in, whether or not an engine has a place for
it, and stays until it ends. In its turns it prefills and decodes at an instance, between them its environment works:
a closed queue of `in_flight` customers. Invariant: those that decode, wait and work sum to `in_flight`.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentrl.plan.figure import Figure
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import decode, kv
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.prefill import Passes, Prefill

Floats = NDArray[np.float64]
ENOUGH = 0.99
"""A window is the fewest episodes in flight that reach this share of the best rate."""
_POINTS = 2000
_LITTLE = "Little 1961, A Proof for the Queuing Formula L = lambda W"


class Flight:
    """Of one instance."""

    def __init__(
        self, plan: PlanInput, gpus: int, instances: Figure, capacity: Figure, pool: Figure, sequence: Figure,
        tail_step: Figure,
    ) -> None:  # fmt: skip
        """`sequence`: KV bytes of a mean sequence in flight."""
        self.plan = plan
        self.given = Given(plan)
        self._gpus, self._instances = gpus, instances
        self._capacity, self._pool, self._sequence, self._tail_step = capacity, pool, sequence, tail_step

    @cached_property
    def each(self) -> Figure:
        episodes, instances = self.given.episodes, self._instances
        formula = f"{episodes.name} / {instances.name}"
        value = episodes.value / instances.value
        return Figure("episodes_per_instance", value, "episodes", formula, (episodes, instances))

    @cached_property
    def in_flight(self) -> Figure:
        """Episodes admitted and not ended; those in their environment are among them."""
        wanted, each = self.plan.rollout.in_flight, self.each
        name, unit = "in_flight_per_instance", "episodes"
        if wanted == "batch":
            return Figure(name, each.value, unit, each.name, (each,), "rollout.in_flight = 'batch'")
        if wanted == "window":
            window = self.window
            return Figure(name, window.value, unit, window.name, (window,), "rollout.in_flight = 'window'")
        given = self.given.rollout("in_flight", "episodes")
        value = min(each.value, given.value / self._instances.value)
        formula = f"min({each.name}, {given.name} / {self._instances.name})"
        return Figure(name, value, unit, formula, (each, given, self._instances))

    @cached_property
    def window(self) -> Figure:
        """The fewest with which the instance is as fast as it gets: more only evict each other's KV and wait."""
        most, each, environment = self._most, self.each, self.given.environment_s
        name, unit = "window_per_instance", "episodes"
        if environment.value == 0:
            formula = f"min({each.name}, {self._capacity.name})"
            return Figure(name, min(each.value, most), unit, formula, (each, self._capacity))
        if self.plan.workload.turn_generation_s is not None:
            share = self.generating_share
            formula = f"min({each.name}, {self._capacity.name} / {share.name})"
            value = min(each.value, most / share.value)
            return Figure(name, value, unit, formula, (each, self._capacity, share))
        counts = np.unique(np.linspace(1, max(1, math.floor(each.value)), _POINTS).astype(np.int64)).astype(np.float64)
        rates = self._turns_per_s(np.minimum(counts, each.value))
        found = counts[int(np.argmax(rates >= ENOUGH * rates.max()))]
        return Figure(
            name, min(float(found), each.value), unit,
            f"fewest with {100 * ENOUGH:g} % of the most turns a second that any number up to {each.name} has",
            (each, self._capacity, self._pool, self._sequence, self._passes.warm, self._passes.cold, environment),
            _LITTLE,
        )  # fmt: skip

    @cached_property
    def residency(self) -> Figure:
        """Share of the waiting episodes' KV that stays in the pool (least recently used goes first)."""
        if self._stays:
            return Figure("kv_residency", 1.0, "share", self._stays, ())
        held = Figure(
            "episodes_kv_bytes", self.in_flight.value * self._sequence.value, "B",
            f"{self.in_flight.name} x {self._sequence.name}", (self.in_flight, self._sequence),
        )  # fmt: skip
        return kv.residency(self._pool, held)

    @cached_property
    def prefill(self) -> Prefill:
        return Prefill(self.plan, self._gpus, self.residency)

    @cached_property
    def generating_share(self) -> Figure:
        """Of an episode's time, in which an engine has it, if no place is short."""
        work, given = self.plan.workload, self.given
        if work.environment_s.mean == 0:
            return Figure("generating_share", 1.0, "share", "1: no environment", ())
        if work.turn_generation_s is not None:
            return decode.measured_generating_share(given.measured_turn_s(), given.environment_s)
        return decode.generating_share(
            self.in_flight, given.turn_tokens, self._tail_step, self._sequence_s, given.environment_s,
            self._turn_prefill,
        )  # fmt: skip

    @property
    def _most(self) -> float:
        return min(self._capacity.value, self.plan.rollout.max_sequences or math.inf)

    @property
    def _stays(self) -> str:
        if self.plan.workload.turns == 1:
            return "1: single turn"
        return "1: KV waits in host memory" if self.plan.rollout.kv_offload else ""

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self.plan, self._gpus)

    @cached_property
    def _sequence_s(self) -> Figure:
        given = self.given
        return decode.sequence_s(
            self._sequence, given.instance_gpus, given.memory_rate, given.assumed("memory_efficiency")
        )

    @cached_property
    def _turn_prefill(self) -> Figure:
        """Seconds in which an instance prefills one turn, and decodes nothing."""
        seconds, each, turns = self.prefill.seconds, self.each, self.given.turns
        value = seconds.value / (each.value * turns.value)
        formula = f"{seconds.name} / ({each.name} x {turns.name})"
        return Figure("turn_prefill_s", value, "s", formula, (seconds, each, turns))

    def _turns_per_s(self, in_flight: Floats) -> Floats:
        """Of an instance, for each number of episodes in flight."""
        resident = np.ones_like(in_flight)
        if not self._stays:
            resident = np.minimum(1.0, self._pool.value / (in_flight * self._sequence.value))
        warm, cold = self._passes.warm.value, self._passes.cold.value
        prefill = (resident * warm + (1 - resident) * cold) / (self.each.value * self.given.turns.value)
        tokens = self.given.turn_tokens.value
        base, slope = tokens * self._tail_step.value, tokens * self._sequence_s.value + prefill
        linear = base + self.given.environment_s.value - in_flight * slope
        batch = (np.sqrt(linear**2 + 4 * slope * in_flight * base) - linear) / (2 * slope)
        batch = np.minimum(batch, self._most)
        rates: Floats = batch / (base + batch * slope)
        return rates
