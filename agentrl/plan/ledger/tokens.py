"""Tokens of a step: sampled, trained on, and prefilled with and without the cache. Read by the other modules.

Invariant: prefill with every block still cached is never more than prefill with none.
"""

from __future__ import annotations

from functools import cached_property

from agentrl.plan.figure import Figure
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given

_VLLM = "vLLM documentation, Automatic Prefix Caching"


class Tokens:
    def __init__(self, plan: PlanInput) -> None:
        self.plan = plan
        self.given = Given(plan)

    @cached_property
    def sampled(self) -> Figure:
        """Sampled by the policy; the loss is on these."""
        given = self.given
        value = given.episodes.value * given.turns.value * given.turn_tokens.value
        inputs = (given.episodes, given.turns, given.turn_tokens)
        return Figure("sampled_tokens", value, "tokens", "episodes x turns x turn_sampled_tokens", inputs)

    @cached_property
    def episode(self) -> Figure:
        """Of one episode at its end."""
        given = self.given
        return Figure(
            "episode_tokens",
            self.plan.workload.episode_tokens,
            "tokens",
            "prompt_tokens + turns x (turn_sampled_tokens + turn_tool_tokens)",
            (given.prompt_tokens, given.turns, given.turn_tokens, given.tool_tokens),
        )

    @cached_property
    def all(self) -> Figure:
        """What forward and training passes go over: prompts, samples and the environment's tokens."""
        given = self.given
        value = given.episodes.value * self.episode.value
        return Figure("step_tokens", value, "tokens", "episodes x episode_tokens", (given.episodes, self.episode))

    @cached_property
    def environment_share(self) -> Figure:
        value = 1 - self.sampled.value / self.all.value if self.all.value else 0.0
        return Figure(
            "environment_token_share", value, "share", "1 - sampled_tokens / step_tokens", (self.sampled, self.all)
        )

    @cached_property
    def prefill_new(self) -> Figure:
        """Tokens prefilled at least: each prompt once for its group, each tool result but the last once."""
        given = self.given
        value = given.prompts.value * given.prompt_tokens.value
        value += given.episodes.value * (given.turns.value - 1) * given.tool_tokens.value
        return Figure(
            "prefill_new_tokens",
            value,
            "tokens",
            "prompts x prompt_tokens + episodes x (turns - 1) x turn_tool_tokens",
            (given.prompts, given.prompt_tokens, given.episodes, given.turns, given.tool_tokens),
            _VLLM,
        )

    @cached_property
    def prefill_cold(self) -> Figure:
        """Tokens prefilled when each turn finds nothing of its context in the cache: quadratic in the turns."""
        given, turns = self.given, self.plan.workload.turns
        growth = given.turn_tokens.value + given.tool_tokens.value
        value = given.episodes.value * (turns * given.prompt_tokens.value + growth * turns * (turns - 1) / 2)
        return Figure(
            "prefill_cold_tokens",
            value,
            "tokens",
            "episodes x (turns x prompt_tokens + (turn_sampled_tokens + turn_tool_tokens) x turns x (turns - 1) / 2)",
            (given.episodes, given.turns, given.prompt_tokens, given.turn_tokens, given.tool_tokens),
            _VLLM,
        )
