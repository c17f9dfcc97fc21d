"""The controller's store on every database: durable on return, compare-and-set, shared transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from agentrl.core.db import Database, open_database
from agentrl.core.errors import Conflict
from agentrl.core.types import SandboxSpec, SandboxState
from sandbox.api import MIGRATIONS
from sandbox.states import Record, advance
from sandbox.store import SandboxStore

T = TypeVar("T")


def record(name: str) -> Record:
    return Record(
        id=f"sb-{name}", owner="o", key=name, digest="d", spec=SandboxSpec(files={"a": name}),
        state=SandboxState.CREATING, created_at=1.0, deadline=2.0,
    )  # fmt: skip


async def opened(url: str) -> SandboxStore:
    return SandboxStore(await open_database(url, room="sandbox", migrations=MIGRATIONS))


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[SandboxStore]:
    made = await opened(store_url)
    yield made
    await made.close()


async def test_records_come_back_as_they_were(store: SandboxStore) -> None:
    records = [record(str(i)) for i in range(20)]
    await asyncio.gather(*(store.save(r) for r in records))
    ended = advance(records[0], SandboxState.FAILED, now=5.0, cause="no room")
    await store.save(ended)
    assert await store.get("sb-0") == ended
    assert sorted(await store.live(), key=lambda r: int(r.key)) == records[1:]
    assert await store.ended("o") == [ended]
    assert await store.ended("another") == []
    assert (await store.keys())["o", "7"] == "sb-7"


async def test_of_saves_that_wait_the_newest_wins(store: SandboxStore) -> None:
    first = record("a")
    saves = [store.save(replace(first, deadline=float(i))) for i in range(10)]
    await asyncio.gather(*saves)
    assert (await store.live())[0].deadline == 9.0


async def test_a_row_that_another_controller_changed_is_not_overwritten(store: SandboxStore, store_url: str) -> None:
    await store.save(record("a"))
    other = await opened(store_url)
    (theirs,) = await other.live()
    await other.save(replace(theirs, deadline=50.0))
    with pytest.raises(Conflict, match="another controller"):
        await store.save(replace(record("a"), deadline=70.0))
    assert (await store.get("sb-a") or theirs).deadline == 50.0
    with pytest.raises(Conflict, match="idempotency key"):
        await other.save(replace(record("a"), id="sb-other"))
    await other.close()


async def test_what_was_written_though_no_answer_came_is_not_written_again(
    store: SandboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, write = [True], Database.write

    async def written(self: Database, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        done = await write(self, work)
        if silent and silent.pop():
            raise OSError("the connection was lost during the commit")
        return done

    monkeypatch.setattr(Database, "write", written)
    monkeypatch.setattr("sandbox.store.PAUSE_S", 0.01)
    for change in (record("a"), replace(record("a"), deadline=9.0), advance(record("a"), SandboxState.LOST, now=5.0)):
        silent[:] = [True]
        store.feed.note(change)
        await asyncio.gather(store.save(change), store.save(record(f"{change.state}{change.deadline}")))
        assert not silent
        assert await store.get("sb-a") == change
    assert [event.seq for event in (await store.feed.page(0)).events] == [1, 2, 3]


async def test_purge_forgets_what_ended_long_ago(store: SandboxStore) -> None:
    for name, ended_at in (("old", 10.0), ("new", 100.0)):
        await store.save(record(name))
        await store.save(advance(record(name), SandboxState.LOST, now=ended_at))
    await store.save(record("live"))
    assert await store.purge(50.0) == [("o", "old")]
    assert set(await store.keys()) == {("o", "new"), ("o", "live")}
