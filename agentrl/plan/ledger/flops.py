"""FLOPs of a step by phase. Called by the ledger's phases, the MFU and the choice of a form.

A token's forward pass is 2 FLOPs a parameter it passes through and its backward pass 4; attention adds a term in the
square of the length that the parameters do not show. Invariant: `step_flops` is the sum of the phases.
"""

from __future__ import annotations

from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.tokens import Tokens

_KAPLAN = "Kaplan et al. 2020, Scaling Laws for Neural Language Models, section 2.1"
_MEGATRON = "Korthikanti et al. 2022, Reducing Activation Recomputation, appendix A"


def pass_flops(name: str, flops_per_parameter: int, active_parameters: Quantity, tokens: Quantity) -> Figure:
    """FLOPs of sending tokens through the parameters: 2 a parameter forward, 6 forward and backward."""
    return Figure(
        name,
        flops_per_parameter * active_parameters.value * tokens.value,
        "FLOP",
        f"{flops_per_parameter} x {active_parameters.name} x {tokens.name}",
        (active_parameters, tokens),
        _KAPLAN,
    )


def attention_flops(pairs: Quantity, pair_flops: Quantity, layers: Quantity, episodes: Quantity) -> Figure:
    """FLOPs of scores and weighted values in one forward pass over the step's episodes."""
    value = pairs.value * pair_flops.value * layers.value * episodes.value
    formula = f"{episodes.name} x {pairs.name} x {pair_flops.name} x {layers.name}"
    return Figure("attention_forward_flops", value, "FLOP", formula, (episodes, pairs, pair_flops, layers), _MEGATRON)


class Flops:
    """The FLOPs of one step of a plan."""

    def __init__(self, plan: PlanInput) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.tokens = Tokens(plan)

    @cached_property
    def prefill(self) -> Figure:
        return pass_flops("prefill_flops", 2, self.given.active_parameters, self.tokens.prefill_new)

    @cached_property
    def decode(self) -> Figure:
        return pass_flops("decode_flops", 2, self.given.active_parameters, self.tokens.sampled)

    @cached_property
    def forward(self) -> Figure:
        """Of all forward passes between rollout and update."""
        trainer = self.plan.trainer
        passes = [
            name
            for name, wanted in (
                ("logprob_flops", trainer.recompute_logprobs),
                ("reference_flops", trainer.reference),
                ("value_flops", trainer.critic),
            )
            if wanted
        ]
        parts = [pass_flops(name, 2, self.given.active_parameters, self.tokens.all) for name in passes]
        return total("forward_flops", "FLOP", [*parts, *self._attention("forward_attention_flops", len(parts))])

    @cached_property
    def train(self) -> Figure:
        names = ["policy_train_flops"] + ["value_train_flops"] * self.plan.trainer.critic
        parts = [pass_flops(name, 6, self.given.active_parameters, self.tokens.all) for name in names]
        return total("train_flops", "FLOP", [*parts, *self._attention("train_attention_flops", 3 * len(parts))])

    @cached_property
    def recompute(self) -> Figure:
        """Done again in the backward pass when activations are not kept. MFU leaves it out, so `step_flops` does."""
        kept = not self.plan.trainer.recompute_activations
        models = Input("recomputed_models", 0 if kept else 1 + self.plan.trainer.critic, source="[trainer]")
        one = pass_flops("recompute_pass_flops", 2, self.given.active_parameters, self.tokens.all)
        return Figure(
            "recompute_flops", one.value * models.value, "FLOP", f"{models.name} x {one.name}", (models, one), _MEGATRON
        )

    @cached_property
    def attention(self) -> Figure:
        given = self.given
        pairs = Input("episode_pairs", self.plan.workload.episode_pairs, source="[workload] E[tokens^2] / 2")
        return attention_flops(pairs, given.pair_flops, given.layers, given.episodes)

    @cached_property
    def attention_share(self) -> Figure:
        """How much attention would add to a forward pass."""
        one = pass_flops("forward_pass_flops", 2, self.given.active_parameters, self.tokens.all)
        value = self.attention.value / one.value if one.value else 0.0
        formula = f"{self.attention.name} / {one.name}"
        return Figure("attention_share", value, "share", formula, (self.attention, one), _MEGATRON)

    @cached_property
    def step(self) -> Figure:
        return total("step_flops", "FLOP", (self.prefill, self.decode, self.forward, self.train))

    def _attention(self, name: str, passes: int) -> list[Figure]:
        if not self.plan.assume.count_attention or not passes:
            return []
        count = Input("attention_passes", passes, source="forward 1, backward 2")
        one = self.attention
        return [Figure(name, passes * one.value, "FLOP", f"{count.name} x {one.name}", (count, one), _MEGATRON)]
