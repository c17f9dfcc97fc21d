"""The plugin API for task environments. Subclassed by plugin authors; called by rollout, agents and reward.

An environment is stateless: everything about one episode is in its Task and its sandbox, so one instance
serves all episodes of a process, and the reward service may score in another process than the one that played.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from agentrl.core.protocols import Sandbox
from agentrl.core.types import (
    Attempt,
    Demonstration,
    Failed,
    Message,
    SandboxSpec,
    Scored,
    Task,
    Tool,
    ToolCall,
    ToolResult,
)

Split = Literal["train", "eval"]


class Environment(ABC):
    """A task source, a sandbox spec, tools and a scorer. Options are keyword arguments of `__init__`."""

    name: ClassVar[str]
    """The id under which tasks and metrics name it."""
    version: ClassVar[str]
    """Change it whenever tasks or scoring change; it is stored with every episode."""
    tools: Sequence[Tool] = ()

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """The tasks in order; the same split and seed give the same tasks. May be endless."""

    @abstractmethod
    def messages(self, task: Task) -> Sequence[Message]:
        """The conversation's start: system and user messages."""

    @abstractmethod
    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        """Price a finished attempt. Runs in the reward service, with the episode's sandbox still alive.

        Failed with blame `agent` is an outcome the policy caused; whatever is raised becomes a Failed
        with blame `infra`, and an attempt without a reward never trains.
        """

    def sandbox(self, task: Task) -> SandboxSpec | None:
        """The sandbox of one episode, or None for an environment without one."""
        return None

    async def act(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        """Carry out one call of a tool in `tools`, with an object as arguments.

        What the model did wrong is a ToolResult; raise only for bugs and infra.
        """
        raise NotImplementedError(f"{type(self).__name__} lists tools but does not implement act()")

    async def call_tool(self, task: Task, call: ToolCall, sandbox: Sandbox | None) -> ToolResult:
        """What agents call: `act`, unless the call names no tool or its arguments are no object."""
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            return ToolResult(content=f"error: no tool {call.name!r}, only {', '.join(names) or 'text answers'}")
        if call.arguments is None:
            return ToolResult(content="error: the arguments are not a JSON object")
        return await self.act(task, call, sandbox)

    def price(self, failure: Failed, task: Task) -> Scored | None:
        """Turn an `agent`-blamed failure into a score, or None to leave the attempt out of training."""
        return None

    def demonstrations(self, seed: int, noise: float) -> Iterator[Demonstration]:
        """Endless worked episodes for the warm start; `noise` in [0, 1] is the share of bad moves."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations: set warm_start.steps = 0")
