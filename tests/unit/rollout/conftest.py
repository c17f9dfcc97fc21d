"""A store, on SQLite and on Postgres, and what fills it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from agentrl.core.db import Database
from agentrl.core.types import Episode, Outcome, Scored, Task
from agentrl.rollout.acceptance import judge
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import Issue, Store, open_store_database
from agentrl.testing.episodes import scripted_episode

LIMIT = 1


@dataclass
class Filler:
    """Plays the producer's part by hand."""

    store: Store

    async def issue(self, group_id: str, *, size: int = 2, version: int = 0) -> Issue:
        ids = tuple(f"{group_id}-{i}" for i in range(size))
        issued = Issue(group_id, Task(env="plain", id=group_id, source="plain"), ids)
        await self.store.issue(issued, position=await self.store.cursor() + 1, version=version)
        return issued

    async def finish(
        self, episode_id: str, *, group_id: str, index: int, outcome: Outcome | None = None, versions: Sequence[int]
    ) -> Episode:
        episode = scripted_episode(episode_id, group_id=group_id, index=index, outcome=outcome, versions=versions)
        await self.store.finish(episode, judge(episode))
        return episode

    async def ready(
        self, group_id: str, *, rewards: Sequence[float] = (0.0, 1.0), versions: Sequence[int] = (0, 0)
    ) -> list[Episode]:
        """A ready group whose episodes sampled with `versions`."""
        issued = await self.issue(group_id, size=len(rewards), version=versions[0])
        episodes = [
            await self.finish(
                id_, group_id=group_id, index=i, versions=versions, outcome=Scored(reward=reward, verifier="1")
            )
            for i, (id_, reward) in enumerate(zip(issued.episode_ids, rewards, strict=True))
        ]
        await self.store.end_group(group_id, None, version=versions[-1])
        return episodes


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await open_store_database(store_url)
    yield opened
    await opened.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def filler(store: Store) -> Filler:
    return Filler(store)


@pytest.fixture
async def buffer(database: Database, store_url: str) -> AsyncIterator[Buffer]:
    """The trainer's side, over a connection of its own as in a run; lag limit 1, two groups a step."""
    opened = await open_store_database(store_url)
    yield Buffer(opened, staleness=Staleness(limit=LIMIT, groups=2, paced=True), min_scored=2)
    await opened.close()
