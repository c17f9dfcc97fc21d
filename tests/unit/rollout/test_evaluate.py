"""Evaluations: resumable, and without a zero for what infra broke."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.core.db import Database
from agentrl.core.errors import Blame
from agentrl.core.types import Failed, Limits, Outcome, Sampling, Scored, ScoreRequest
from agentrl.rollout.episode import Player
from agentrl.rollout.evaluate import evaluate, evaluated_episodes, held_out, load_evaluation, succeeded
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.rewards import ScriptedRewards
from agentrl.testing.sessions import ScriptedSessions

ENVIRONMENT = PlainEnvironment(count=8)
TASKS = held_out(ENVIRONMENT, seed=0, count=10, limits=Limits(turns=2))
NUMBER = {task.id: i for i, task in enumerate(TASKS)}


def _player(rewards: ScriptedRewards) -> Player:
    return Player(
        environment=ENVIRONMENT, agent=ScriptedAgent(), sessions=ScriptedSessions(version=3), sandboxes=None,
        rewards=rewards, sampling=Sampling(), owner="test",
    )  # fmt: skip


def _half(request: ScoreRequest) -> Outcome:
    return Scored(reward=float(NUMBER[request.task.id] % 2))


def test_held_out_tasks_are_as_many_as_there_are_under_the_runs_limits() -> None:
    assert len(TASKS) == 8
    assert {task.limits.turns for task in TASKS} == {2}


async def test_an_evaluation_is_stored_and_read_back(database: Database) -> None:
    found = await evaluate(
        _player(ScriptedRewards(_half)), database, label="before", tasks=TASKS, concurrency=3, retries=0
    )
    assert (found.tasks, found.answered, found.infra_failures) == (8, 8, 0)
    assert (found.success_rate, found.mean_reward, found.mean_turns, found.mean_tokens) == (0.5, 0.5, 2.0, 10.0)
    assert found.versions == (3,)
    assert await load_evaluation(database, "before") == found
    assert await load_evaluation(database, "after") is None
    assert [episode.index for episode in await evaluated_episodes(database, "before")] == list(range(8))


async def test_infra_failures_are_tried_again_then_reported_and_in_no_mean(database: Database) -> None:
    def script(request: ScoreRequest) -> Outcome:
        return Failed(code="SCORER") if NUMBER[request.task.id] == 0 else Scored(reward=1.0)

    rewards = ScriptedRewards(script)
    found = await evaluate(_player(rewards), database, label="x", tasks=TASKS, concurrency=8, retries=2)
    assert (found.answered, found.infra_failures, found.success_rate, found.mean_reward) == (7, 1, 1.0, 1.0)
    assert found.failures == {"SCORER": 1}
    assert len(rewards.requests) == 7 + 3


async def test_the_policys_failures_count_against_success_but_carry_no_reward(database: Database) -> None:
    def script(request: ScoreRequest) -> Outcome:
        cheated = NUMBER[request.task.id] < 2
        return Failed(code="CHEATED", blame=Blame.AGENT) if cheated else Scored(reward=1.0)

    found = await evaluate(_player(ScriptedRewards(script)), database, label="x", tasks=TASKS, concurrency=8, retries=2)
    assert (found.answered, found.success_rate, found.mean_reward) == (8, 0.75, 1.0)


async def test_an_evaluation_continues_where_it_stopped(database: Database) -> None:
    def dies(request: ScoreRequest) -> Outcome:
        if NUMBER[request.task.id] == 5:
            raise RuntimeError("the process is gone")
        return _half(request)

    with pytest.raises(RuntimeError, match="the process is gone"):
        await evaluate(_player(ScriptedRewards(dies)), database, label="x", tasks=TASKS, concurrency=1, retries=0)
    rewards = ScriptedRewards(_half)
    found = await evaluate(_player(rewards), database, label="x", tasks=TASKS, concurrency=1, retries=0)
    assert (found.answered, found.success_rate) == (8, 0.5)
    assert [NUMBER[request.task.id] for request in rewards.requests] == [5, 6, 7]


async def test_what_infra_broke_is_played_again_by_the_next_call(database: Database) -> None:
    broken = ScriptedRewards(lambda request: Failed(code="SCORER"))
    assert (
        await evaluate(_player(broken), database, label="x", tasks=TASKS, concurrency=8, retries=0)
    ).success_rate is None
    healed = replace(_player(broken), rewards=ScriptedRewards(_half))
    found = await evaluate(healed, database, label="x", tasks=TASKS, concurrency=8, retries=0)
    assert (found.answered, found.failures) == (8, {})


@pytest.mark.parametrize(
    ("outcome", "success"),
    [
        (Scored(reward=1.0), True),
        (Scored(reward=0.9), False),
        (Scored(reward=0.2, parts={"success": 1.0}), True),
        (Scored(reward=1.5, parts={"success": 0.0}), False),
        (Failed(code="X", blame=Blame.AGENT), False),
    ],
)
def test_success_is_a_full_reward_unless_the_environment_says_otherwise(outcome: Outcome, success: bool) -> None:
    assert succeeded(outcome) is success
