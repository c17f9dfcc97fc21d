"""A vault whose verifier breaks: a plugin for tests of what a failed reward becomes."""

from __future__ import annotations

import random

from agentrl import Attempt, Sandbox, Scored, Task
from agentrl.core.errors import ServiceUnavailable
from envs.vault.environment import Vault


class FlakyVault(Vault):
    """Of `share` of the attempts at training tasks, the verifier cannot say anything."""

    def __init__(self, share: float = 0.2) -> None:
        super().__init__()
        self.share = share

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored:
        if task.id.startswith("train") and random.random() < self.share:
            raise ServiceUnavailable("the verifier's own service is away")
        return await super().score(task, attempt, sandbox)
