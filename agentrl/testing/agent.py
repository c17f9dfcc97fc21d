"""An agent that calls no model: what it does in an episode follows a script. Used by tests and benchmarks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.core.protocols import AgentContext
from agentrl.core.types import Attempt, Message, Stop

Script = Callable[[AgentContext], Awaitable[None]]


@dataclass(slots=True)
class ScriptedAgent:
    """See `protocols.Agent`. The script may sleep, use the sandbox, or raise."""

    script: Script | None = None
    turns: int = 2

    async def run(self, context: AgentContext) -> Attempt:
        start = tuple(context.environment.messages(context.task))
        if self.script is not None:
            await self.script(context)
        reply = Message(role="assistant", content="done")
        return Attempt(stop=Stop.ANSWERED, turns=self.turns, transcript=(*start, reply))

    async def close(self) -> None:
        """Nothing to release."""
