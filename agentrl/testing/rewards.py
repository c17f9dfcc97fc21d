"""A reward service without a service: outcomes follow a script, in memory. Used by tests and benchmarks.

Invariant: like the real one it never raises, and it stamps a verifier version on what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.core.types import Outcome, ScoreRequest

Script = Callable[[ScoreRequest], Outcome]


@dataclass(slots=True)
class ScriptedRewards:
    """See `protocols.Rewards`."""

    script: Script
    verifier: str = "scripted/1"
    requests: list[ScoreRequest] = field(default_factory=list)

    async def score(self, request: ScoreRequest) -> Outcome:
        self.requests.append(request)
        return self.script(request).model_copy(update={"verifier": self.verifier})
