"""What leaves rollout.db once its steps are long over, and that nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from agentrl.core.config import parse_config
from agentrl.core.db import Database
from agentrl.core.errors import NotFound
from agentrl.rollout.audit import audit
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.retention import kept_steps, prune
from agentrl.rollout.store import Store
from agentrl.rollout.tables import PRUNED, DropReason, episodes


async def whole(database: Database) -> set[str]:
    """Groups whose episodes still have their tokens."""
    query = select(episodes.c.group_id).where(episodes.c.payload.is_not(None), episodes.c.payload != PRUNED)
    async with database.read() as connection:
        return set((await connection.execute(query)).scalars())


@pytest.fixture
async def trained(database: Database, buffer: Buffer, filler: Any) -> Database:
    """Three steps of two groups, a dropped group before the second of them, one that waits and one that runs."""
    for step in (1, 2, 3):
        for number in (1, 2):
            await filler.ready(f"g{step}{number}")
        if step == 2:
            await filler.issue("dropped")
            await filler.finish("dropped-0", group_id="dropped", index=0, versions=(0,))
            await filler.finish("dropped-1", group_id="dropped", index=1, versions=(0,))
            await filler.store.end_group("dropped", DropReason.FLAT, version=0)
        await buffer.take(step, version=0, groups=2)
        await buffer.commit(step, version=0, checkpoint=f"c{step}")
    await filler.ready("waits")
    await filler.issue("runs")
    await filler.finish("runs-0", group_id="runs", index=0, versions=(0,))
    return database


async def test_old_steps_keep_their_facts_only(trained: Database, store: Store) -> None:
    before = await audit(trained)
    assert before.ok, before.findings
    assert await prune(trained, after=0, upto=1) == 4
    assert await whole(trained) == {"g21", "g22", "g31", "g32", "dropped", "waits", "runs"}
    assert await prune(trained, after=1, upto=2) == 6
    assert await prune(trained, after=0, upto=2) == 0
    assert await whole(trained) == {"g31", "g32", "waits", "runs"}
    assert await audit(trained) == before
    with pytest.raises(NotFound, match="keep_steps"):
        await store.episode("g11-0")
    assert (await store.episode("g31-0")).group_id == "g31"


async def test_a_pruned_group_that_waits_is_found(trained: Database) -> None:
    async with trained.engine.begin() as connection:
        await connection.execute(episodes.update().where(episodes.c.group_id == "waits").values(payload=PRUNED))
    found = {(finding.promise, finding.where) for finding in (await audit(trained)).findings}
    assert found == {("nothing accepted is lost", "waits-0"), ("nothing accepted is lost", "waits-1")}


async def test_a_resume_from_before_gives_back_what_is_whole(trained: Database, buffer: Buffer) -> None:
    await prune(trained, after=0, upto=1)
    await buffer.rewind(0)
    report = await audit(trained)
    assert report.ok, report.findings
    assert report.groups == {"dropped/pruned": 2, "dropped/flat": 1, "ready": 5, "running": 1}
    batch = await buffer.take(1, version=0, groups=2)
    assert [group.id for group in batch.groups] == ["g21", "g22"]


def test_kept_checkpoints_can_always_be_resumed_from() -> None:
    train = {"keep_checkpoints": 4, "checkpoint_every": 5}
    assert kept_steps(parse_config({"rollout": {"keep_steps": 3}, "train": train})) == 20
    assert kept_steps(parse_config({"rollout": {"keep_steps": 30}, "train": train})) == 30
