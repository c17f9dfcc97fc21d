"""The rollout process against a trainer, over the durable store: what it promises when parts of it fail."""

from __future__ import annotations

import asyncio
import traceback
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select

from agentrl.core.errors import NoProgress
from agentrl.core.http import Service, free_port
from agentrl.core.protocols import AgentContext, Batch
from agentrl.core.types import Limits, Message, SandboxSpec, SandboxState, Scored, Task
from agentrl.rollout.acceptance import judge
from agentrl.rollout.audit import audit
from agentrl.rollout.evaluate import load_evaluation
from agentrl.rollout.service import Listen, Rooms, run_rollout
from agentrl.rollout.store import Issue, Store
from agentrl.rollout.tables import PRUNED, claims, episodes, groups, samples
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.episodes import scripted_episode


def _lags(batch: Batch, *, version: int) -> list[int]:
    """Lag of every trained token of a batch that was taken at `version`."""
    paths = [t for group in batch.groups for episode in group.episodes for t in episode.trajectories]
    return [version - sampled for path in paths for sampled in path.policy_versions if sampled is not None]


@pytest.mark.parametrize(("form", "limit"), [("sync", 0), ("one_step", 1), ("async", 2)])
async def test_every_form_trains_within_its_lag(world: Any, make_config: Any, form: str, limit: int) -> None:
    world.config = make_config(form=form, max_lag=2)
    _, batches = await asyncio.gather(world.rollout().run(), world.train())
    assert [len(batch.groups) for batch in batches] == [3] * 4
    assert max(lag for batch in batches for lag in _lags(batch, version=batch.step - 1)) <= limit
    report = await audit(world.database)
    assert report.ok
    assert (report.groups["trained"], report.steps) == (12, 4)


async def test_a_long_run_keeps_the_tokens_of_its_last_steps(world: Any, make_config: Any) -> None:
    world.config = make_config(steps=6, keep_steps=1)

    async def oldest_whole() -> int:
        query = select(func.min(claims.c.step)).join(episodes, episodes.c.group_id == claims.c.group_id)
        async with world.database.read() as connection:
            return int(await connection.scalar(query.where(episodes.c.payload != PRUNED)) or 0)

    async def train() -> None:
        await world.train(steps=5)
        # The two checkpoints that are kept go back as far as step 4.
        async with asyncio.timeout(20):
            while await oldest_whole() < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await world.train(after=5, version=6, steps=1)

    await asyncio.gather(world.rollout().run(), train())
    report = await audit(world.database)
    assert report.ok, report.findings
    assert report.steps == 6


async def test_a_fifth_of_the_rewards_failing_leaves_no_trace_in_any_sample(
    world: Any, make_config: Any, make_rewards: Any
) -> None:
    world.config, world.rewards = make_config(steps=5, reissues=1), make_rewards(infra_every=5)
    _, batches = await asyncio.gather(world.rollout().run(), world.train())
    async with world.database.read() as connection:
        failed = (await connection.execute(select(episodes.c.id).where(episodes.c.reason == "SCORER"))).scalars().all()
        priced = select(episodes.c.id).where(episodes.c.id.in_(failed), episodes.c.reward.is_not(None))
        assert (await connection.execute(priced)).all() == []
        assert (await connection.execute(select(samples).where(samples.c.episode_id.in_(failed)))).all() == []
    assert len(failed) >= 10
    trained = [episode for batch in batches for group in batch.groups for episode in group.episodes]
    assert all(isinstance(episode.outcome, Scored) for episode in trained)
    assert not {episode.id for episode in trained} & set(failed)
    assert (await audit(world.database)).ok


async def test_a_hung_environment_hits_its_deadline_and_the_step_goes_on(world: Any, make_config: Any) -> None:
    async def sometimes_hang(context: AgentContext) -> None:
        if context.task.id.endswith("1"):
            await asyncio.Event().wait()

    # The hung group holds every place, so nothing goes on before its deadline.
    world.config = make_config(limits=Limits(wall_s=0.2), reissues=0, concurrency=4)
    world.agent = ScriptedAgent(sometimes_hang)
    _, batches = await asyncio.gather(world.rollout().run(), world.train())
    assert len(batches) == 4
    async with world.database.read() as connection:
        reasons = (await connection.execute(select(episodes.c.reason, episodes.c.blame).distinct())).all()
    assert ("DEADLINE", "infra") in [tuple(reason) for reason in reasons]
    report = await audit(world.database)
    assert report.ok
    assert report.groups["dropped/too_few_scored"] >= 1


class Buggy(PlainEnvironment):
    def messages(self, task: Task) -> tuple[Message, ...]:
        if task.id.endswith("7"):
            raise ZeroDivisionError("a bug in the environment")
        return (Message(role="user", content=task.id),)


async def test_a_bug_in_the_environment_ends_the_run_with_its_traceback(world: Any) -> None:
    world.environment = Buggy()
    training = asyncio.create_task(world.train())
    with pytest.raises(ZeroDivisionError, match="a bug in the environment") as raised:
        await world.rollout().run()
    training.cancel()
    assert "in messages" in "".join(traceback.format_exception(raised.value))
    assert world.sessions.unsealed == 0
    assert (await audit(world.database)).ok


async def test_a_store_that_fails_ends_the_run(world: Any, wait_until: Any) -> None:
    training = asyncio.create_task(world.train())
    rollout = asyncio.create_task(world.rollout().run())

    async def scoring() -> bool:
        return bool(world.rewards.requests)

    await wait_until(scoring)
    async with world.database.engine.begin() as connection:
        await connection.execute(samples.delete())
        await connection.exec_driver_sql("DROP TABLE rollout_samples")
    with pytest.raises(Exception, match="rollout_samples"):
        await rollout
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


async def test_a_restart_keeps_ready_groups_and_issues_running_episodes_again(
    world: Any, make_config: Any, wait_until: Any
) -> None:
    world.config = make_config(steps=6, concurrency=6)
    held: list[str] = []

    async def hold_some(context: AgentContext) -> None:
        if len(world.rewards.requests) > 20 and len(held) < 6:
            held.append(context.task.id)
            await asyncio.Event().wait()

    world.agent = ScriptedAgent(hold_some)
    first = asyncio.create_task(world.rollout().run())
    batches = asyncio.create_task(world.train())

    async def holding() -> bool:
        return len(held) == 6

    await wait_until(holding)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    before = await audit(world.database)
    assert before.episodes["running"] >= 6

    await world.rollout().run()
    assert len(await batches) == 6
    after = await audit(world.database)
    assert after.ok
    assert after.groups["trained"] == 18
    async with world.database.read() as connection:
        interrupted = select(episodes.c.group_id, episodes.c.slot).where(episodes.c.reason == "INTERRUPTED")
        slots = {tuple(row) for row in (await connection.execute(interrupted)).all()}
        issued = select(episodes.c.group_id, episodes.c.slot, episodes.c.issue)
        issues = [(group, slot) for group, slot, issue in (await connection.execute(issued)).all() if issue > 0]
    assert len(slots) == before.episodes["running"]
    assert sorted(issues) == sorted(slots), "each interrupted attempt is issued again, once"


async def test_a_restart_closes_its_own_leftover_sandboxes_and_nobody_elses(world: Any) -> None:
    world.environment.spec = SandboxSpec()
    acquire = partial(world.sandboxes.acquire, world.environment.spec)
    async with acquire(owner="this-run", key="a") as mine, acquire(owner="another-run", key="b") as theirs:
        await asyncio.gather(world.rollout().run(), world.train())
        assert mine.box.state is SandboxState.CLOSED
        assert [view.id for view in await world.sandboxes.list()] == [theirs.id]


async def test_a_trainer_that_dies_between_claim_and_commit_loses_nothing(world: Any, make_config: Any) -> None:
    world.config = make_config(steps=6)
    rollout = asyncio.create_task(world.rollout().run())
    await world.train(steps=2)
    claimed = await world.buffer.take(3, version=2, groups=3)
    await world.buffer.rewind(2)
    resumed = await world.buffer.latest_version() + 1
    batches = await world.train(after=2, version=resumed)
    await rollout
    report = await audit(world.database)
    assert report.ok
    assert (report.groups["trained"], report.steps) == (18, 6)
    # The restored weights have a new number, so what was sampled at the edge of the limit is now beyond it.
    trained = {group.id for batch in batches for group in batch.groups}
    async with world.database.read() as connection:
        stale = set((await connection.execute(select(groups.c.id).where(groups.c.reason == "stale"))).scalars().all())
    assert {group.id for group in claimed.groups} <= trained | stale


async def test_a_run_without_progress_says_what_it_waits_for(world: Any, make_config: Any) -> None:
    world.config = make_config(trainer_wait_s=1.0)
    await world.buffer.publish_version(0, step=0, path="v0")
    with pytest.raises(NoProgress, match="waiting for the trainer to take a step") as raised:
        await world.rollout().run()
    assert "no episode has failed" in str(raised.value)


async def test_a_run_in_which_every_score_fails_stops_and_names_the_code(
    world: Any, make_config: Any, make_rewards: Any
) -> None:
    world.config, world.rewards = make_config(no_progress_s=1.0), make_rewards(infra_every=1)
    await world.buffer.publish_version(0, step=0, path="v0")
    with pytest.raises(NoProgress, match="SCORER x"):
        await world.rollout().run()


async def test_nothing_happens_before_the_first_version(world: Any, make_config: Any) -> None:
    world.config = make_config(trainer_wait_s=0.2, eval_tasks=4)
    with pytest.raises(NoProgress, match="first policy version"):
        await world.rollout().run()
    assert world.sessions.sessions == {}


async def test_the_policy_is_evaluated_before_and_after(world: Any, make_config: Any) -> None:
    world.config = make_config(eval_tasks=6)
    await asyncio.gather(world.rollout().run(), world.train())
    before = await load_evaluation(world.database, "before")
    after = await load_evaluation(world.database, "after")
    assert before is not None
    assert after is not None
    assert (before.answered, before.versions) == (6, (0,))
    assert (after.answered, after.versions) == (6, (4,))


async def test_the_policy_is_evaluated_every_so_many_steps(world: Any, make_config: Any) -> None:
    world.config = make_config(steps=5, eval_tasks=3, eval_every=2)
    await asyncio.gather(world.rollout().run(), world.train())
    for label, at_least in (("step-2", 2), ("step-4", 4)):
        found = await load_evaluation(world.database, label)
        assert found is not None
        assert found.answered == 3
        # The training goes on meanwhile, and an evaluation says which versions it saw.
        assert min(found.versions) >= at_least
    assert await load_evaluation(world.database, "step-5") is None


async def test_a_restart_measures_no_policy_under_an_earlier_steps_name(world: Any, make_config: Any) -> None:
    world.config = make_config(steps=6, eval_tasks=3)
    first = asyncio.create_task(world.rollout().run())
    await world.train(steps=4)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.config = make_config(steps=6, eval_tasks=3, eval_every=2)
    await asyncio.gather(world.rollout().run(), world.train(after=4, version=5))
    assert await load_evaluation(world.database, "step-2") is None
    found = await load_evaluation(world.database, "step-4")
    assert found is not None
    assert min(found.versions) >= 4


async def test_a_flat_group_that_a_restart_completes_counts_against_the_budget(world: Any, make_config: Any) -> None:
    store, version = Store(world.database), 3
    await world.buffer.publish_version(version, step=0, path="v3")
    ids = tuple(f"e{index}" for index in range(4))
    task = next(iter(world.environment.tasks("train", 0)))
    await store.issue(Issue("g000001", task, ids), position=1, version=version)
    for index, id_ in enumerate(ids):
        outcome = Scored(reward=0.0, verifier="1")
        played = scripted_episode(id_, group_id="g000001", index=index, outcome=outcome, versions=(version,))
        await store.finish(played, judge(played))
    world.config = make_config(steps=1)
    await asyncio.gather(world.rollout().run(), world.train(version=version))
    async with world.database.read() as connection:
        row = (await connection.execute(select(groups).where(groups.c.id == "g000001"))).one()
    assert (row.state, row.reason, row.ended_version) == ("dropped", "flat", version)


async def test_a_flat_environment_still_trains_within_its_resampling_budget(world: Any, make_config: Any) -> None:
    world.config = make_config(flat_limit=1)
    world.rewards.script = lambda request: Scored(reward=1.0)
    _, batches = await asyncio.gather(world.rollout().run(), world.train())
    assert len(batches) == 4
    report = await audit(world.database)
    assert report.ok
    # Three flat groups are replaced for each of the five versions at most; the rest are taken as they are.
    assert 3 <= report.groups["dropped/flat"] <= 15


async def test_at_limit_drop_sweeps_what_got_too_old(world: Any, make_config: Any, wait_until: Any) -> None:
    world.config = make_config(form="async", max_lag=0, at_limit="drop", steps=3)
    rollout = asyncio.create_task(world.rollout().run())
    buffer = world.buffer
    await buffer.publish_version(0, step=0, path="v0")

    async def six_ready() -> bool:
        return (await Store(world.database).ledger()).ready >= 6

    await wait_until(six_ready)
    for version in (1, 2, 3):
        await buffer.publish_version(version, step=version, path=f"v{version}")
    batches = await world.train(version=4)
    await rollout
    assert {lag for batch in batches for lag in _lags(batch, version=batch.step + 3)} == {0}
    report = await audit(world.database)
    assert report.ok
    assert report.swept_samples >= 6 * 4
    assert batches[0].dropped_samples >= 6 * 4


async def test_the_process_serves_its_metrics_and_status(world: Any, make_config: Any, make_rewards: Any) -> None:
    world.config, world.rewards = make_config(steps=3, eval_tasks=2), make_rewards(infra_every=5)
    port = free_port()
    rooms = Rooms(world.environment, world.agent, world.sessions, world.sandboxes, world.rewards)
    running = asyncio.create_task(run_rollout(world.config, rooms, world.database, Listen(port, token="secret")))
    service = Service(f"http://127.0.0.1:{port}", token="secret")
    await world.train(steps=2)
    status = (await service.request("GET", "/v1/status")).json()
    metrics = (await service.request("GET", "/metrics")).text
    await world.train(after=2, version=2)
    await running
    await service.close()
    assert (status["phase"], status["steps"], status["version"]) == ("training", 2, 2)
    assert status["groups/trained"] == 6
    assert 'agentrl_rollout_episodes_total{source="plain",state="accepted"}' in metrics
    assert 'agentrl_rollout_failures_total{blame="infra",code="SCORER"}' in metrics
    assert "agentrl_rollout_running_episodes" in metrics
    assert 'agentrl_rollout_eval_success_ratio{label="before"}' in metrics
