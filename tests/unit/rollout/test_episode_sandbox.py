"""The sandbox of an episode: alive while it is scored, closed on every way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from agentrl.core.errors import SandboxError
from agentrl.core.protocols import AgentContext
from agentrl.core.types import (
    ExecRequest,
    Failed,
    Limits,
    Outcome,
    Sampling,
    SandboxSpec,
    SandboxState,
    Scored,
    ScoreRequest,
    Task,
)
from agentrl.rollout.episode import Order, Player
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.rewards import ScriptedRewards
from agentrl.testing.sandbox import InMemorySandboxes
from agentrl.testing.sessions import ScriptedSessions

SPEC = SandboxSpec(files={"note": "hello"})


def _player(
    sandboxes: InMemorySandboxes,
    *,
    agent: Callable[[AgentContext], Awaitable[None]] | None = None,
    score: Callable[[ScoreRequest], Outcome] = lambda request: Scored(reward=1.0),
) -> Player:
    return Player(
        environment=PlainEnvironment(spec=SPEC), agent=ScriptedAgent(agent), sessions=ScriptedSessions(),
        sandboxes=sandboxes, rewards=ScriptedRewards(score), sampling=Sampling(), owner="test",
    )  # fmt: skip


def _order(*, wall_s: float = 5.0, id_: str = "e") -> Order:
    task = Task(env="plain", id="t", source="plain", limits=Limits(wall_s=wall_s))
    return Order(id_, "g", 0, task, time.monotonic())


def _states(sandboxes: InMemorySandboxes) -> set[SandboxState]:
    return {box.state for box in sandboxes.boxes.values()}


async def _read_note(context: AgentContext) -> None:
    assert context.sandbox is not None
    result = await context.sandbox.exec(ExecRequest(argv=("cat", "note")))
    await context.sandbox.write("answer", result.stdout)


async def test_the_sandbox_is_alive_while_the_attempt_is_scored_and_closed_after() -> None:
    sandboxes = InMemorySandboxes()

    def score(request: ScoreRequest) -> Outcome:
        assert request.sandbox_id is not None
        box = sandboxes.boxes[request.sandbox_id]
        assert box.state is SandboxState.READY
        return Scored(reward=float(box.files["/work/answer"] == b"hello"))

    episode = (await _player(sandboxes, agent=_read_note, score=score).play(_order())).episode
    assert episode.outcome == Scored(reward=1.0, verifier="scripted/1")
    assert episode.sandbox_id in sandboxes.boxes
    assert _states(sandboxes) == {SandboxState.CLOSED}
    assert episode.timings.sandbox_s > 0


async def test_the_lease_outlasts_an_agent_that_only_thinks() -> None:
    sandboxes = InMemorySandboxes()
    await _player(sandboxes).play(_order(wall_s=900.0))
    (box,) = sandboxes.boxes.values()
    assert box.spec.ttl_s >= 900.0
    assert box.spec.model_copy(update={"ttl_s": SPEC.ttl_s}) == SPEC


async def test_a_controller_without_room_is_asked_again_within_the_deadline() -> None:
    sandboxes = InMemorySandboxes(capacity=1)
    holds, release = asyncio.Event(), asyncio.Event()

    async def hold(context: AgentContext) -> None:
        holds.set()
        await release.wait()

    first = asyncio.create_task(_player(sandboxes, agent=hold).play(_order(id_="one")))
    await holds.wait()
    second = asyncio.create_task(_player(sandboxes).play(_order(id_="two")))
    await asyncio.sleep(0.05)
    assert not second.done()
    release.set()
    outcomes = [(await playing).episode.outcome for playing in (first, second)]
    assert all(isinstance(outcome, Scored) for outcome in outcomes)


async def test_no_room_until_the_deadline_is_an_infra_failure() -> None:
    outcome = (await _player(InMemorySandboxes(capacity=0)).play(_order(wall_s=0.1))).episode.outcome
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.detail) == ("DEADLINE", "0.1 s were not enough to acquire a sandbox")


async def _lost(context: AgentContext) -> None:
    raise SandboxError("exec failed")


async def _bug(context: AgentContext) -> None:
    raise ZeroDivisionError


async def _hang(context: AgentContext) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("ending", [_lost, _bug, _hang], ids=["failure", "bug", "deadline"])
async def test_the_sandbox_is_closed_however_the_attempt_ends(
    ending: Callable[[AgentContext], Awaitable[None]],
) -> None:
    sandboxes = InMemorySandboxes()
    playing = asyncio.create_task(_player(sandboxes, agent=ending).play(_order(wall_s=0.2)))
    (result,) = await asyncio.gather(playing, return_exceptions=True)
    assert isinstance(result, ZeroDivisionError) == (ending is _bug)
    assert _states(sandboxes) == {SandboxState.CLOSED}


@pytest.mark.parametrize("create_s", [0.0, 30.0], ids=["while playing", "while creating"])
async def test_a_cancelled_episode_leaves_no_sandbox(create_s: float) -> None:
    sandboxes = InMemorySandboxes(create_s=create_s)
    playing = asyncio.create_task(_player(sandboxes, agent=_hang).play(_order()))
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert SandboxState.READY not in _states(sandboxes)
