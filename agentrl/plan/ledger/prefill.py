"""Prefill of a step with and without the KV cache being there. Called by `rollout`.

Each turn sends its whole history; what of it must be computed again depends on whether its KV blocks survived the
environment's seconds. Invariant: the time at the actual residency lies between the two extremes.
"""

from __future__ import annotations

from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import kv
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


class Prefill:
    def __init__(
        self, plan: PlanInput, gpus: int, pool: Figure, context: Figure, per_token: Figure, instances: Figure
    ) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.tokens = Tokens(plan)
        self._gpus = self.given.gpus("rollout_gpus", gpus)
        self._pool, self._context, self._per_token, self._instances = pool, context, per_token, instances

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
    def every_token_once(self) -> Figure:
        """Every token of the step once, sampled ones too: what a warm cache costs if sampled blocks are not shared."""
        return self._time("prefill_once_s", self.tokens.all)

    @cached_property
    def cold(self) -> Figure:
        """Nothing is found: each turn computes its whole context."""
        return self._time("prefill_cold_s", self.tokens.prefill_cold)

    @cached_property
    def residency(self) -> Figure:
        """Share of the waiting episodes' KV that stays in the pool (least recently used goes first)."""
        if self.plan.workload.turns == 1 or self.plan.rollout.kv_offload:
            why = "1: single turn" if self.plan.workload.turns == 1 else "1: KV waits in host memory"
            return Figure("kv_residency", 1.0, "share", why, ())
        episodes = Input("episodes_per_instance", self.given.episodes.value / self._instances.value)
        held = Figure(
            "episodes_kv_bytes",
            episodes.value * self._context.value * self._per_token.value,
            "B",
            f"{episodes.name} x {self._context.name} x {self._per_token.name}",
            (episodes, self._context, self._per_token),
        )
        return kv.residency(self._pool, held)

    @cached_property
    def seconds(self) -> Figure:
        return mixed_prefill_s(self.residency, self.warm, self.cold)
