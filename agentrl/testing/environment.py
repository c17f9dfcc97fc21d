"""An environment that asks nothing of the machine. Used by tests and benchmarks of everything around environments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentrl.core.environment import Environment, Split
from agentrl.core.protocols import Sandbox
from agentrl.core.types import Attempt, Failed, Limits, Message, SandboxSpec, Scored, Task


@dataclass
class PlainEnvironment(Environment):
    """Numbered tasks; every attempt is worth `reward`."""

    name: ClassVar[str] = "plain"
    version: ClassVar[str] = "1"
    count: int | None = None
    """Tasks of a split; None is endless."""
    limits: Limits = Limits()  # noqa: RUF009  # frozen
    spec: SandboxSpec | None = None
    reward: float = 1.0
    priced: Scored | None = None
    """What an agent failure is worth."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for i in itertools.count() if self.count is None else range(self.count):
            yield Task(env=self.name, id=f"{split}-{seed}-{i}", source=self.name, limits=self.limits)

    def messages(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", content=task.id),)

    def sandbox(self, task: Task) -> SandboxSpec | None:
        return self.spec

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        return Scored(reward=self.reward)

    def price(self, failure: Failed, task: Task) -> Scored | None:
        return self.priced
