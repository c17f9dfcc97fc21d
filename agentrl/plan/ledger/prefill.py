"""Prefill of a step with and without the KV cache being there. Called by `flight`.

Each turn sends its whole history; what of it must be computed again depends on whether its KV blocks survived the
environment's seconds. Invariant: the time at the actual residency lies between the two extremes.
"""

from __future__ import annotations

from functools import cached_property

from agentrl.plan.figure import Figure, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.tokens import Tokens

_VLLM = "vLLM documentation, Automatic Prefix Caching"


def prefill_s(
    name: str, tokens: Quantity, active_parameters: Quantity, gpus: Quantity, peak: Quantity, mfu: Quantity
) -> Figure:
    """Time to send tokens through the model once, compute bound."""
    value = 2 * active_parameters.value * tokens.value / (gpus.value * peak.value * mfu.value)
    formula = f"2 x {active_parameters.name} x {tokens.name} / ({gpus.name} x {peak.name} x {mfu.name})"
    return Figure(name, value, "s", formula, (active_parameters, tokens, gpus, peak, mfu), _VLLM)


def mixed_prefill_s(resident: Quantity, warm: Quantity, cold: Quantity) -> Figure:
    """Prefill when a share of the history is found in the cache."""
    value = resident.value * warm.value + (1 - resident.value) * cold.value
    formula = f"{resident.name} x {warm.name} + (1 - {resident.name}) x {cold.name}"
    return Figure("prefill_s", value, "s", formula, (resident, warm, cold), _VLLM)


class Passes:
    """The two extremes."""

    def __init__(self, plan: PlanInput, gpus: int) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.tokens = Tokens(plan)
        self._gpus = self.given.gpus("rollout_gpus", gpus)

    def _time(self, name: str, tokens: Quantity) -> Figure:
        given = self.given
        return prefill_s(
            name, tokens, given.active_parameters, self._gpus, given.peak_flops, given.assumed("prefill_mfu")
        )

    @cached_property
    def warm(self) -> Figure:
        """Everything is found in the cache: only new tokens are computed."""
        return self._time("prefill_warm_s", self.tokens.prefill_new)

    @cached_property
    def cold(self) -> Figure:
        """Nothing is found: each turn computes its whole context."""
        return self._time("prefill_cold_s", self.tokens.prefill_cold)


class Prefill(Passes):
    """At the share of the waiting KV that stays in the pool."""

    def __init__(self, plan: PlanInput, gpus: int, residency: Figure) -> None:
        super().__init__(plan, gpus)
        self.residency = residency

    @cached_property
    def seconds(self) -> Figure:
        return mixed_prefill_s(self.residency, self.warm, self.cold)
