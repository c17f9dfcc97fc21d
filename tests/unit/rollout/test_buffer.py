"""The trainer's side of the store: claims, commits, crashes and the sweep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.core.db import Database
from agentrl.core.errors import RolloutError
from agentrl.core.protocols import Batch
from agentrl.rollout.audit import audit
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import Store, open_store_database


def _ids(batch: Batch) -> list[str]:
    return [group.id for group in batch.groups]


async def test_take_waits_for_enough_groups_and_takes_the_oldest(buffer: Buffer, filler: Any) -> None:
    await filler.ready("g1")
    taking = asyncio.create_task(buffer.take(1, version=0, groups=2))
    await asyncio.sleep(0.1)
    assert not taking.done()
    await filler.ready("g2")
    await filler.ready("g3")
    batch = await taking
    assert _ids(batch) == ["g1", "g2"]
    assert [episode.outcome.reward for episode in batch.groups[0].episodes] == [0.0, 1.0]


async def test_committed_groups_are_never_taken_again(buffer: Buffer, filler: Any, database: Database) -> None:
    for number in range(1, 5):
        await filler.ready(f"g{number}")
    await buffer.take(1, version=0, groups=2)
    await buffer.commit(1, version=0, checkpoint="c1")
    await buffer.commit(1, version=0, checkpoint="c1")
    assert _ids(await buffer.take(2, version=1, groups=2)) == ["g3", "g4"]
    assert (await audit(database)).findings == ()


async def test_a_step_taken_again_after_a_crash_gets_the_same_groups(
    buffer: Buffer, filler: Any, database: Database
) -> None:
    for number in range(1, 4):
        await filler.ready(f"g{number}")
    first = await buffer.take(1, version=0, groups=2)
    again = await buffer.take(1, version=0, groups=2)
    assert again == first
    await buffer.commit(1, version=0, checkpoint="c1")
    report = await audit(database)
    assert report.ok
    assert report.groups == {"trained": 2, "ready": 1}


async def test_a_rewind_gives_back_every_later_claim(buffer: Buffer, filler: Any, database: Database) -> None:
    for number in range(1, 7):
        await filler.ready(f"g{number}")
    for step in (1, 2):
        await buffer.take(step, version=step - 1, groups=2)
        await buffer.commit(step, version=step - 1, checkpoint=f"c{step}")
    await buffer.take(3, version=1, groups=2)
    await buffer.rewind(1)
    report = await audit(database)
    assert report.ok
    assert (report.groups, report.steps) == ({"trained": 2, "ready": 4}, 1)
    assert _ids(await buffer.take(2, version=1, groups=2)) == ["g3", "g4"]


async def test_one_checkpoint_may_make_several_steps_final(buffer: Buffer, filler: Any, database: Database) -> None:
    for number in range(1, 5):
        await filler.ready(f"g{number}")
    await buffer.take(1, version=0, groups=2)
    await buffer.take(2, version=1, groups=2)
    await buffer.commit(2, version=1, checkpoint="c2")
    report = await audit(database)
    assert report.ok
    assert (report.groups, report.steps) == ({"trained": 4}, 2)


async def test_committing_a_step_that_was_not_taken_is_refused(buffer: Buffer) -> None:
    with pytest.raises(RolloutError, match="no group is claimed"):
        await buffer.commit(3, version=0, checkpoint="c3")


async def test_samples_beyond_the_limit_are_swept_with_their_lengths(
    buffer: Buffer, filler: Any, database: Database
) -> None:
    """The limit is 1: at version 2, what version 0 sampled any trained token of is too old."""
    (old, _) = await filler.ready("old", versions=(0, 0))
    await filler.ready("mixed", versions=(0, 1))
    await filler.ready("young", versions=(1, 2))
    await filler.ready("new", versions=(2, 2))
    batch = await buffer.take(3, version=2, groups=2)
    assert _ids(batch) == ["young", "new"]
    assert batch.dropped_samples == 4
    report = await audit(database)
    assert report.ok
    assert report.groups == {"dropped/stale": 2, "claimed": 2}
    assert report.swept_tokens == 4 * len(old.trajectories[0].token_ids)


async def test_a_group_outlives_a_swept_sample_while_enough_are_left(buffer: Buffer, filler: Any, store: Store) -> None:
    issued = await filler.issue("g", size=3)
    for index, versions in enumerate([(0,), (2,), (2,)]):
        await filler.finish(issued.episode_ids[index], group_id="g", index=index, versions=versions)
    await store.end_group("g", None, version=2)
    batch = await buffer.take(3, version=2, groups=1)
    assert [episode.index for episode in batch.groups[0].episodes] == [1, 2]
    assert batch.dropped_samples == 1


async def test_without_lag_only_the_current_version_is_taken(database: Database, filler: Any) -> None:
    sync = Buffer(database, staleness=Staleness(limit=0, groups=1, paced=True), min_scored=2)
    await filler.ready("before", versions=(0,))
    await filler.ready("now", versions=(1,))
    assert _ids(await sync.take(2, version=1, groups=1)) == ["now"]


async def test_a_version_never_names_two_sets_of_weights(buffer: Buffer) -> None:
    assert await buffer.latest_version() == -1
    await buffer.publish_version(0, step=0, path="weights/v0")
    await buffer.publish_version(0, step=0, path="weights/v0")
    with pytest.raises(RolloutError, match="new number"):
        await buffer.publish_version(0, step=1, path="elsewhere")
    await buffer.publish_version(1, step=1, path="weights/v1")
    assert await buffer.latest_version() == 1


async def test_producer_and_trainer_share_the_store_without_losing_a_group(
    store_url: str, buffer: Buffer, filler: Any, database: Database
) -> None:
    """Two connections write at once, as two processes do; each group trains exactly once."""

    async def produce() -> None:
        for number in range(24):
            await filler.ready(f"g{number:02d}", versions=(number // 2,))

    async def train() -> list[str]:
        seen: list[str] = []
        for step in range(1, 13):
            seen += _ids(await buffer.take(step, version=step - 1, groups=2))
            await buffer.commit(step, version=step - 1, checkpoint=f"c{step}")
        return seen

    _, seen = await asyncio.gather(produce(), train())
    assert seen == [f"g{number:02d}" for number in range(24)]
    reopened = await open_store_database(store_url)
    report = await audit(reopened)
    await reopened.close()
    assert report.ok
    assert report.groups == {"trained": 24}
