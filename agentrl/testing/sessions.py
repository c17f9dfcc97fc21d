"""A gateway without a gateway: sessions whose trajectories follow a script, in memory.

Used by the tests and benchmarks of rollout and train. Invariant: what it exports is what a real gateway would
export of an agent that made `turns` calls: consistent arrays, and versions that never fall along a path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.core.errors import AgentRLError, NotFound
from agentrl.core.types import Provenance, Sampling, SessionGrant, SessionRequest, Trajectory

Alter = Callable[[Trajectory], Sequence[Trajectory]]


@dataclass(slots=True)
class _Session:
    id: str
    request: SessionRequest
    opened_at_version: int
    sealed: tuple[Trajectory, ...] | None = None


@dataclass(slots=True)
class ScriptedSessions:
    """See `protocols.Sessions`. Set `version` when the policy advances; calls after that sample with it."""

    version: int = 0
    turns: int = 2
    prompt_tokens: int = 4
    """Tokens before each call that were not sampled."""
    sampled_tokens: int = 5
    """Tokens of each call."""
    alter: Alter | None = None
    """Replaces a session's one trajectory by others, e.g. broken ones."""
    failures: list[AgentRLError] = field(default_factory=list)
    """Raised one by one, by the next calls of open and seal."""
    seed: int = 0
    sessions: dict[str, _Session] = field(default_factory=dict)

    @property
    def unsealed(self) -> int:
        return sum(session.sealed is None for session in self.sessions.values())

    async def open(self, request: SessionRequest) -> SessionGrant:
        self._fail()
        id_ = f"session-{len(self.sessions)}"
        self.sessions[id_] = _Session(id_, request, self.version)
        return SessionGrant(id=id_, key=f"key-{id_}", base_url=f"http://scripted.invalid/s/key-{id_}/v1")

    async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
        self._fail()
        session = self._session(session_id)
        if session.sealed is None:
            played = self._play(session)
            session.sealed = tuple(self.alter(played)) if self.alter else (played,)
        return session.sealed

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        return self._session(session_id).sealed or ()

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def _session(self, session_id: str) -> _Session:
        if session_id not in self.sessions:
            raise NotFound(f"session {session_id} is not known")
        return self.sessions[session_id]

    def _play(self, session: _Session) -> Trajectory:
        # The last call ran when the session was sealed, the others when it was opened.
        versions = [session.opened_at_version] * (self.turns - 1) + [self.version]
        return scripted_trajectory(
            session.id, versions=versions, prompt_tokens=self.prompt_tokens, sampled_tokens=self.sampled_tokens,
            sampling=session.request.sampling, seed=self.seed,
        )  # fmt: skip


def scripted_trajectory(
    session_id: str,
    *,
    versions: Sequence[int],
    prompt_tokens: int = 4,
    sampled_tokens: int = 5,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Trajectory:
    """The one trajectory of a session with a call for each of `versions`, the version that sampled it."""
    rng = random.Random(f"{seed} {session_id}")
    calls = len(versions)
    sampled = [[math.log(rng.uniform(0.05, 1.0)) for _ in range(sampled_tokens)] for _ in versions]
    gap = [None] * prompt_tokens
    return Trajectory(
        id=f"{session_id}/0",
        session_id=session_id,
        token_ids=tuple(rng.randrange(256) for _ in range(calls * (prompt_tokens + sampled_tokens))),
        loss_mask=tuple(([0] * prompt_tokens + [1] * sampled_tokens) * calls),
        behavior_logprobs=tuple(x for logprobs in sampled for x in (*gap, *logprobs)),
        policy_versions=tuple(x for version in versions for x in (*gap, *[version] * sampled_tokens)),
        finish="terminated",
        session_tokens=calls * sampled_tokens,
        provenance=Provenance(
            tokenizer="scripted", renderer="scripted", engine="scripted/1", sampling=sampling or Sampling()
        ),
    )
