"""One attempt: every way it can end, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from agentrl.core.errors import AgentRLError, Blame, EngineError, LimitReached, SandboxLost, ServiceUnavailable
from agentrl.core.protocols import AgentContext
from agentrl.core.types import Attempt, Failed, Limits, Message, Outcome, Sampling, Scored, Stop, Task, Trajectory
from agentrl.rollout.acceptance import Defect, judge
from agentrl.rollout.episode import Order, Played, Player
from agentrl.rollout.tables import EpisodeState
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.rewards import ScriptedRewards
from agentrl.testing.sessions import ScriptedSessions

WON = Scored(reward=1.0)


def _player(sessions: ScriptedSessions, *, outcome: Outcome = WON) -> Player:
    return Player(
        environment=PlainEnvironment(), agent=ScriptedAgent(), sessions=sessions, sandboxes=None,
        rewards=ScriptedRewards(lambda request: outcome), sampling=Sampling(), owner="test", score_s=1.0,
    )  # fmt: skip


def _order(*, wall_s: float = 5.0) -> Order:
    task = Task(env="plain", id="t", source="plain", limits=Limits(wall_s=wall_s))
    return Order("e", "g", 0, task, time.monotonic())


async def _raising(error: Exception) -> None:
    raise error


async def test_a_played_episode_carries_everything_that_is_stored(sessions: ScriptedSessions) -> None:
    played = await _player(sessions).play(_order())
    episode = played.episode
    assert judge(episode).state is EpisodeState.ACCEPTED
    assert episode.outcome == Scored(reward=1.0, verifier="scripted/1")
    assert episode.attempt.stop is Stop.ANSWERED
    assert episode.trajectories == await sessions.trajectories(episode.session_id)
    assert episode.timings.total_s >= episode.timings.model_s
    assert sessions.unsealed == 0


async def test_a_reward_that_failed_stays_a_failure(sessions: ScriptedSessions) -> None:
    failure = Failed(code="SCORER", detail="died")
    played = await _player(sessions, outcome=failure).play(_order())
    assert played.episode.outcome == failure.model_copy(update={"verifier": "scripted/1"})
    assert played.episode.trajectories


async def test_a_hung_attempt_hits_its_deadline_and_blames_nobody_but_infra(sessions: ScriptedSessions) -> None:
    async def hang(context: AgentContext) -> None:
        await asyncio.Event().wait()

    player = replace(_player(sessions), agent=ScriptedAgent(hang))
    outcome = (await player.play(_order(wall_s=0.1))).episode.outcome
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == ("DEADLINE", Blame.INFRA)
    assert "to play" in outcome.detail
    assert sessions.unsealed == 0


async def test_an_attempt_that_ignores_its_cancellation_is_left_behind(
    sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.bounds.CANCEL_GRACE_S", 0.05)
    release = asyncio.Event()

    async def stubborn(context: AgentContext) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    player = replace(_player(sessions), agent=ScriptedAgent(stubborn))
    outcome = (await player.play(_order(wall_s=0.05))).episode.outcome
    release.set()
    assert isinstance(outcome, Failed)
    assert outcome.code == "DEADLINE"
    assert sessions.unsealed == 0


@pytest.mark.parametrize(("stop", "code"), [(Stop.DEADLINE, "DEADLINE"), (Stop.ERROR, "AGENT")])
async def test_an_agent_that_gave_up_is_not_scored(sessions: ScriptedSessions, stop: Stop, code: str) -> None:
    class GaveUp(ScriptedAgent):
        async def run(self, context: AgentContext) -> Attempt:
            return Attempt(stop=stop, turns=1, transcript=(Message(role="user"),))

    player = replace(_player(sessions), agent=GaveUp())
    outcome = (await player.play(_order())).episode.outcome
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == (code, Blame.INFRA)
    assert isinstance(player.rewards, ScriptedRewards)
    assert player.rewards.requests == []


@pytest.mark.parametrize("error", [EngineError("no replica"), SandboxLost("evicted"), AgentRLError("who knows")])
async def test_an_error_that_is_not_the_policys_becomes_an_infra_failure(
    sessions: ScriptedSessions, error: AgentRLError
) -> None:
    player = replace(_player(sessions), agent=ScriptedAgent(lambda context: _raising(error)))
    player.environment.priced = WON  # type: ignore[attr-defined]
    outcome = (await player.play(_order())).episode.outcome
    assert outcome == Failed.of(error)


@pytest.mark.parametrize("priced", [None, Scored(reward=-1.0)])
async def test_the_policys_failure_is_priced_by_the_environment_alone(
    sessions: ScriptedSessions, priced: Scored | None
) -> None:
    error = LimitReached("out of tokens")
    player = replace(
        _player(sessions),
        agent=ScriptedAgent(lambda context: _raising(error)),
        environment=PlainEnvironment(priced=priced),
    )
    outcome = (await player.play(_order())).episode.outcome
    assert outcome == (Failed.of(error) if priced is None else Scored(reward=-1.0, verifier="1"))


async def test_a_scorers_agent_failure_is_priced_too(sessions: ScriptedSessions) -> None:
    player = _player(sessions, outcome=Failed(code="CHEATED", blame=Blame.AGENT))
    player = replace(player, environment=PlainEnvironment(priced=Scored(reward=-2.0)))
    assert (await player.play(_order())).episode.outcome == Scored(reward=-2.0, verifier="1")


@pytest.mark.parametrize("bug", [ValueError("bad move"), TimeoutError("of their own"), KeyError("x")])
async def test_a_bug_in_plugin_code_is_raised_and_the_session_is_sealed(
    sessions: ScriptedSessions, bug: Exception
) -> None:
    player = replace(_player(sessions), agent=ScriptedAgent(lambda context: _raising(bug)))
    with pytest.raises(type(bug)) as raised:
        await player.play(_order())
    assert raised.value is bug
    assert sessions.unsealed == 0


async def test_a_cancelled_episode_seals_its_session(sessions: ScriptedSessions) -> None:
    started = asyncio.Event()

    async def hang(context: AgentContext) -> None:
        started.set()
        await asyncio.Event().wait()

    playing = asyncio.create_task(replace(_player(sessions), agent=ScriptedAgent(hang)).play(_order()))
    await started.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (len(sessions.sessions), sessions.unsealed) == (1, 0)


async def test_a_gateway_that_comes_back_in_time_costs_nothing(sessions: ScriptedSessions) -> None:
    sessions.failures = [ServiceUnavailable("restarting"), ServiceUnavailable("restarting")]
    assert isinstance((await _player(sessions).play(_order())).episode.outcome, Scored)


async def test_a_gateway_that_stays_away_is_a_deadline_of_infra(sessions: ScriptedSessions) -> None:
    sessions.failures = [ServiceUnavailable("gone") for _ in range(100)]
    outcome = (await _player(sessions).play(_order(wall_s=0.2))).episode.outcome
    assert isinstance(outcome, Failed)
    assert "to open a session" in outcome.detail


async def test_a_score_without_its_trajectories_is_a_failure(sessions: ScriptedSessions) -> None:
    class Unsealable(ScriptedSessions):
        async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
            raise AgentRLError("the store is broken")

    outcome = (await _player(Unsealable()).play(_order())).episode.outcome
    assert isinstance(outcome, Failed)
    assert "the store is broken" in outcome.detail


async def test_an_export_that_does_not_parse_is_quarantined_not_raised() -> None:
    class Garbled(ScriptedSessions):
        async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
            return TypeAdapter(tuple[Trajectory, ...]).validate_python([{"id": "x"}])

    played: Played = await _player(Garbled()).play(_order())
    verdict = judge(played.episode, played.unreadable)
    assert (verdict.state, verdict.reason) == (EpisodeState.QUARANTINED, Defect.UNREADABLE)


async def test_the_agent_gets_what_is_left_of_the_clock(sessions: ScriptedSessions) -> None:
    seen: list[Limits] = []

    async def look(context: AgentContext) -> None:
        seen.append(context.limits)

    await replace(_player(sessions), agent=ScriptedAgent(look)).play(_order(wall_s=5.0))
    assert 0 < seen[0].wall_s <= 5.0


async def test_a_scorer_that_hangs_is_cut(sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.episode.SCORE_GRACE_S", 0.0)

    class Hanging(ScriptedRewards):
        async def score(self, request: object) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    player = replace(_player(sessions), rewards=Hanging(lambda request: WON), score_s=0.05)
    outcome = (await player.play(_order())).episode.outcome
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == ("DEADLINE", Blame.INFRA)


@pytest.fixture
def sessions() -> ScriptedSessions:
    return ScriptedSessions()


def test_every_stop_is_known() -> None:
    """`_outcome` sorts the stops into those that are scored and those that are not."""
    scored: Sequence[Stop] = (Stop.DONE, Stop.ANSWERED, Stop.TURNS, Stop.TOKENS)
    assert {*scored, Stop.DEADLINE, Stop.ERROR} == set(Stop)
