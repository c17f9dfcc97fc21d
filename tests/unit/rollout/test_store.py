"""The rollout process's side of the store."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from agentrl.core.db import Database
from agentrl.core.errors import NotFound, RolloutError
from agentrl.core.types import Failed
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.staleness import Ledger
from agentrl.rollout.store import Store, open_store_database
from agentrl.rollout.tables import INTERRUPTED, DropReason, EpisodeState, metadata


async def test_migrations_create_the_tables_as_described(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"version_table": "rollout_schema_version"})
        return list(compare_metadata(context, metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_a_store_keeps_its_name(store: Store, store_url: str) -> None:
    name = await store.identity()
    database = await open_store_database(store_url)
    assert await Store(database).identity() == name
    await database.close()


async def test_an_episode_comes_back_as_it_was_stored(store: Store, filler: Any) -> None:
    (episode, _) = await filler.ready("g1")
    assert await store.episode(episode.id) == episode
    with pytest.raises(NotFound):
        await store.episode("unknown")


async def test_the_ledger_counts_what_admission_needs(store: Store, buffer: Buffer, filler: Any) -> None:
    assert await store.ledger() == Ledger(version=-1, ready=0, consumed=0, flat=0, steps=0, taken=0, served=-1)
    await buffer.publish_version(0, step=0, path="v0")
    for group_id in ("g1", "g2", "g3"):
        await filler.ready(group_id)
    await filler.issue("g4")
    await store.end_group("g4", DropReason.FLAT, version=0)
    assert await store.ledger() == Ledger(version=0, ready=3, consumed=0, flat=1, steps=0, taken=0, served=0)
    await buffer.take(1, version=0, groups=2)
    assert await store.ledger() == Ledger(version=0, ready=1, consumed=2, flat=1, steps=0, taken=1, served=0)
    await buffer.commit(1, version=0, checkpoint="c1")
    assert await store.ledger() == Ledger(version=0, ready=1, consumed=2, flat=1, steps=1, taken=1, served=0)
    await buffer.publish_version(1, step=1, path="v1")
    assert await store.ledger() == Ledger(version=1, ready=1, consumed=0, flat=0, steps=1, taken=1, served=1)


async def test_a_restart_finds_the_unfinished_groups_and_what_became_of_each_slot(
    store_url: str, store: Store, filler: Any
) -> None:
    await filler.ready("done")
    await filler.issue("g", size=3)
    await filler.finish("g-0", group_id="g", index=0, versions=(0,))
    await filler.finish("g-1", group_id="g", index=1, outcome=Failed(code="REWARD"), versions=(0,))
    await store.reissue("g-1-again", "g", 1)

    database = await open_store_database(store_url)
    restarted = Store(database)
    (group,) = await restarted.unfinished()
    assert (group.group_id, group.task.id) == ("g", "g")
    assert [slot.state for slot in group.slots] == [EpisodeState.ACCEPTED, EpisodeState.FAILED, EpisodeState.FAILED]
    assert [slot.episode_id for slot in group.slots] == ["g-0", "g-1-again", "g-2"]
    assert group.slots[0].reward == 1.0
    assert group.tries == (0, 1, 0)
    assert await restarted.cursor() == 2
    counts = await restarted.counts()
    assert counts["episodes/failed"] == 3
    await restarted.reissue("g-2-again", "g", 2)
    await database.close()


async def test_an_interrupted_episode_that_answers_late_is_refused(store: Store, filler: Any) -> None:
    """Two processes must not both own a slot."""
    await filler.issue("g")
    await store.unfinished()
    with pytest.raises(RolloutError, match="not running"):
        await filler.finish("g-0", group_id="g", index=0, versions=(0,))
    assert INTERRUPTED == "INTERRUPTED"


async def test_a_group_ends_once(store: Store, filler: Any) -> None:
    await filler.ready("g")
    with pytest.raises(RolloutError, match="ended twice"):
        await store.end_group("g", DropReason.FLAT, version=0)


async def test_a_failed_episode_leaves_no_reward_and_no_sample(store: Store, buffer: Buffer, filler: Any) -> None:
    await filler.issue("g", size=3)
    for index, outcome in enumerate((None, None, Failed(code="REWARD"))):
        await filler.finish(f"g-{index}", group_id="g", index=index, outcome=outcome, versions=(0,))
    await store.end_group("g", None, version=0)
    batch = await buffer.take(1, version=0, groups=1)
    assert [episode.id for episode in batch.groups[0].episodes] == ["g-0", "g-1"]
    assert batch.groups[0].size == 3
