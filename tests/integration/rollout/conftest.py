"""A rollout process and a trainer process in one loop, over one store and two connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.core.config import RunConfig, parse_config
from agentrl.core.db import Database, sqlite_url
from agentrl.core.protocols import Batch
from agentrl.core.types import Failed, Outcome, Scored, ScoreRequest
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.service import Rollout, Rooms
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import open_store_database
from agentrl.testing.agent import ScriptedAgent
from agentrl.testing.environment import PlainEnvironment
from agentrl.testing.rewards import ScriptedRewards
from agentrl.testing.sandbox import InMemorySandboxes
from agentrl.testing.sessions import ScriptedSessions

ROLLOUT = {"groups": 3, "group_size": 4, "concurrency": 16, "no_progress_s": 20.0}


@dataclass
class World:
    """Both sides of the store, and everything the rollout talks to."""

    database: Database
    trainers_database: Database
    sessions: ScriptedSessions = field(default_factory=ScriptedSessions)
    sandboxes: InMemorySandboxes = field(default_factory=InMemorySandboxes)
    agent: ScriptedAgent = field(default_factory=ScriptedAgent)
    environment: PlainEnvironment = field(default_factory=PlainEnvironment)
    rewards: ScriptedRewards = field(default_factory=lambda: ScriptedRewards(alternate()))
    config: RunConfig = field(default_factory=lambda: config())

    def rollout(self) -> Rollout:
        rooms = Rooms(self.environment, self.agent, self.sessions, self.sandboxes, self.rewards)
        return Rollout(self.config, rooms, self.database, owner="this-run")

    @property
    def buffer(self) -> Buffer:
        rollout = self.config.rollout
        return Buffer(self.trainers_database, staleness=Staleness.of(rollout), min_scored=rollout.min_scored)

    async def train(self, *, after: int = 0, version: int = 0, steps: int | None = None) -> list[Batch]:
        """Consume as the trainer does, from the checkpoint of step `after`, whose weights it publishes as `version`.

        The engine follows each version at once.
        """
        buffer, batches = self.buffer, []
        await self._publish(version, after)
        for step in range(after + 1, 1 + (self.config.train.steps if steps is None else after + steps)):
            batches.append(await buffer.take(step, version=version, groups=self.config.rollout.groups))
            await buffer.commit(step, version=version, checkpoint=f"c{step}")
            version += 1
            await self._publish(version, step)
        return batches

    async def _publish(self, version: int, step: int) -> None:
        self.sessions.version = version
        await self.buffer.publish_version(version, step=step, path=f"v{version}")


def config(*, steps: int = 4, eval_tasks: int = 0, eval_every: int = 0, **rollout: object) -> RunConfig:
    tree = {
        "rollout": {**ROLLOUT, **rollout},
        "train": {"steps": steps},
        "eval": {"tasks": eval_tasks, "every": eval_every},
    }
    return parse_config(tree)


def alternate(*, infra_every: int = 0) -> Callable[[ScoreRequest], Outcome]:
    """Rewards 0, 1, 0, 1, ...; with `infra_every` = n each n-th score fails instead."""
    calls = iter(range(10**9))

    def script(request: ScoreRequest) -> Outcome:
        call = next(calls)
        if infra_every and call % infra_every == 0:
            return Failed(code="SCORER", detail="the verifier died")
        return Scored(reward=float(call % 2))

    return script


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await reached():
            return
        await asyncio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    url = sqlite_url(tmp_path / "rollout.db")
    one, two = await open_store_database(url), await open_store_database(url)
    yield World(one, two)
    await one.close()
    await two.close()


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    return config


@pytest.fixture
def wait_until() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
def make_rewards() -> Callable[..., ScriptedRewards]:
    return lambda infra_every=0: ScriptedRewards(alternate(infra_every=infra_every))
