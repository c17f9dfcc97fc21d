"""Plays one attempt at a task: session, sandbox, agent, score, seal. Awaited by the producer and by `evaluate`.

Invariant: whatever goes wrong around the policy comes back as a Failed outcome, never as a number; a bug in
the environment's or the agent's code (any exception that is no AgentRLError) is raised; and the session is
sealed and the sandbox closed on every way out, cancellation included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError

from agentrl.core.environment import Environment
from agentrl.core.errors import AgentRLError, Blame, RolloutError
from agentrl.core.protocols import Agent, AgentContext, Rewards, Sandboxes, Sessions
from agentrl.core.types import (
    Attempt,
    Episode,
    Failed,
    Outcome,
    Sampling,
    SandboxSpec,
    ScoreRequest,
    SessionGrant,
    SessionRequest,
    Stop,
    Task,
    Timings,
    Trajectory,
)
from agentrl.rollout.bounds import TIDY_S, Expired, patiently, released, tidy, within
from agentrl.rollout.clock import TimedSandbox

log = logging.getLogger(__name__)

DEADLINE = "DEADLINE"
SCORE_GRACE_S = 3.0
"""How long a score may travel after its deadline: the service itself says that it was late."""


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt to play."""

    episode_id: str
    group_id: str
    index: int
    task: Task
    queued_at: float
    """time.monotonic() from which the attempt waited for its turn."""


@dataclass(frozen=True, slots=True)
class Played:
    episode: Episode
    unreadable: str = ""
    """Why the session's trajectories could not be read; empty when they could."""


@dataclass(slots=True)
class _Record:
    """What is known of an attempt so far."""

    order: Order
    phase: str = "open a session"
    started: float = field(default_factory=time.monotonic)
    session: SessionGrant | None = None
    sandbox: TimedSandbox | None = None
    attempt: Attempt = field(default_factory=lambda: Attempt(stop=Stop.ERROR, turns=0, transcript=()))
    trajectories: tuple[Trajectory, ...] = ()
    unreadable: str = ""
    acquire_s: float = 0.0
    agent_s: float = 0.0
    reward_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.order.task.limits.wall_s - (time.monotonic() - self.started)


@dataclass(frozen=True, slots=True)
class Player:
    """The rooms that one attempt needs; shared by all episodes of a process."""

    environment: Environment
    agent: Agent
    sessions: Sessions
    sandboxes: Sandboxes | None
    """None when the environment uses none."""
    rewards: Rewards
    sampling: Sampling
    owner: str
    """Names the run to the sandbox controller."""
    model: str = "policy"
    score_s: float = 30.0
    """Budget of the scoring, after the attempt's own wall clock."""

    async def play(self, order: Order) -> Played:
        """Play the attempt to its outcome. Raises only what is a bug in plugin code."""
        record = _Record(order)
        async with AsyncExitStack() as held:
            outcome = await self._outcome(record, held)
            # Sealing is part of the attempt: without its trajectories a score is worth nothing.
            if record.session is not None:
                outcome = await self._seal(record, record.session.id, outcome)
        return Played(self._episode(record, outcome), record.unreadable)

    async def _outcome(self, record: _Record, held: AsyncExitStack) -> Outcome:
        task = record.order.task
        try:
            record.attempt = await within(record.left_s, self._attempt(record, held))
        except Expired:
            record.attempt = Attempt(stop=Stop.DEADLINE, turns=0, transcript=())
            return Failed(code=DEADLINE, detail=f"{task.limits.wall_s} s were not enough to {record.phase}")
        except AgentRLError as error:
            return self._priced(Failed.of(error), task)
        if record.attempt.stop in (Stop.DEADLINE, Stop.ERROR):
            # The agent cannot tell a slow policy from a slow service, and unknown means infra.
            code = DEADLINE if record.attempt.stop is Stop.DEADLINE else "AGENT"
            return Failed(code=code, detail=f"the agent stopped with {record.attempt.stop.value!r}")
        return self._priced(await self._score(record), task)

    async def _attempt(self, record: _Record, held: AsyncExitStack) -> Attempt:
        task = record.order.task
        # The attempt's deadline is kept here; the gateway's clock only bounds what is left behind.
        lax = task.limits.model_copy(update={"wall_s": task.limits.wall_s + self.score_s})
        request = SessionRequest(task_id=task.id, limits=lax, sampling=self.sampling)
        session = await held.enter_async_context(self._opened(request))
        record.session = session
        spec = self.environment.sandbox(task)
        if spec is not None:
            record.phase = "acquire a sandbox"
            record.sandbox = await self._acquire(record, spec, held)
        record.phase = "play"
        began = time.monotonic()
        limits = task.limits.model_copy(update={"wall_s": max(record.left_s, 0.001)})
        context = AgentContext(
            task=task, environment=self.environment, base_url=session.base_url, api_key=session.key,
            model=self.model, limits=limits, sandbox=record.sandbox,
        )  # fmt: skip
        try:
            return await self.agent.run(context)
        finally:
            record.agent_s = time.monotonic() - began

    @asynccontextmanager
    async def _opened(self, request: SessionRequest) -> AsyncIterator[SessionGrant]:
        grant = await patiently(lambda: self.sessions.open(request))
        try:
            yield grant
        except BaseException:
            # Nobody will ask for the trajectories any more, but replicas hold the session's prefix.
            await tidy(self.sessions.seal(grant.id), f"sealing session {grant.id}")
            raise

    async def _acquire(self, record: _Record, spec: SandboxSpec, held: AsyncExitStack) -> TimedSandbox:
        sandboxes = self.sandboxes
        if sandboxes is None:
            raise RolloutError(f"{self.environment.name} asks for a sandbox, but the run has no sandbox controller")
        # A lease counts from the last command, and an agent may think for as long as it has.
        spec = spec.model_copy(update={"ttl_s": max(spec.ttl_s, record.order.task.limits.wall_s + self.score_s)})
        began = time.monotonic()
        # One key over all tries: a controller that created it but could not say so hands over the same sandbox.
        key = f"{self.owner}/{record.order.episode_id}"
        sandbox = await patiently(
            lambda: held.enter_async_context(
                released(sandboxes.acquire(spec, owner=self.owner, key=key), f"closing {key}")
            )
        )
        record.acquire_s = time.monotonic() - began
        return TimedSandbox(sandbox)

    async def _score(self, record: _Record) -> Outcome:
        request = ScoreRequest(
            episode_id=record.order.episode_id, task=record.order.task, attempt=record.attempt,
            sandbox_id=record.sandbox.id if record.sandbox else None, deadline_s=self.score_s,
        )  # fmt: skip
        began = time.monotonic()
        try:
            return await within(self.score_s + SCORE_GRACE_S, self.rewards.score(request))
        except Expired:
            return Failed(code=DEADLINE, detail=f"{self.score_s} s were not enough to score")
        except AgentRLError as error:
            return Failed.of(error)
        finally:
            record.reward_s = time.monotonic() - began

    def _priced(self, outcome: Outcome, task: Task) -> Outcome:
        """An `agent`-blamed failure as the environment prices it; everything else as it is."""
        if not isinstance(outcome, Failed) or outcome.blame is not Blame.AGENT:
            return outcome
        price = self.environment.price(outcome, task)
        if price is None:
            return outcome
        return price if price.verifier else price.model_copy(update={"verifier": self.environment.version})

    async def _seal(self, record: _Record, session_id: str, outcome: Outcome) -> Outcome:
        try:
            record.trajectories = await within(TIDY_S, patiently(lambda: self.sessions.seal(session_id)))
        except ValidationError as error:
            record.unreadable = f"session {session_id}: {error}"
        except (AgentRLError, Expired) as error:
            log.warning("session %s of episode %s cannot be sealed: %s", session_id, record.order.episode_id, error)
            if not isinstance(outcome, Failed):
                detail = f"scored, but session {session_id} cannot be sealed: {error}"
                return Failed(code=getattr(error, "code", DEADLINE), detail=detail)
        return outcome

    def _episode(self, record: _Record, outcome: Outcome) -> Episode:
        order = record.order
        in_sandbox_s = record.sandbox.seconds if record.sandbox else 0.0
        timings = Timings(
            queue_s=record.started - order.queued_at,
            sandbox_s=record.acquire_s + in_sandbox_s,
            model_s=max(0.0, record.agent_s - in_sandbox_s),
            reward_s=record.reward_s,
            total_s=time.monotonic() - record.started,
        )
        return Episode(
            id=order.episode_id, group_id=order.group_id, index=order.index, task=order.task,
            env_version=self.environment.version, session_id=record.session.id if record.session else "",
            sandbox_id=record.sandbox.id if record.sandbox else None, trajectories=record.trajectories,
            attempt=record.attempt, outcome=outcome, timings=timings,
        )  # fmt: skip
