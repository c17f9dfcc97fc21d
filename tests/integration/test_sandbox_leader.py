"""Several controllers on one store: one leads, another takes over with every sandbox, none acts after it lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import TOKEN, ControllerProcess, fork_server, sh

from agentrl.core.db import Database, open_database
from agentrl.core.errors import Ran, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import SandboxSpec
from sandbox.api import LOST_LEADERSHIP, MIGRATIONS
from sandbox.client import SandboxClient
from sandbox.election import Election

LEASE = {"leader_lease_s": 6.0}


@pytest.fixture
async def databases(store_url: str) -> AsyncIterator[tuple[Database, Database]]:
    """Two connections to one store."""
    first = await open_database(store_url, room="sandbox", migrations=MIGRATIONS)
    second = await open_database(store_url, room="sandbox", migrations=MIGRATIONS)
    yield first, second
    await first.close()
    await second.close()


async def test_one_of_two_leads_until_it_resigns_or_is_silent(databases: tuple[Database, Database]) -> None:
    one, two = (Election(db, url=f"http://{n}", lease_s=3.0) for n, db in enumerate(databases))
    runs = [asyncio.create_task(one.campaign()), asyncio.create_task(two.campaign())]
    done, waiting = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    leader, follower = (one, two) if runs[0] in done else (two, one)
    lost = asyncio.Event()
    holding = asyncio.create_task(leader.hold(lost.set))
    await asyncio.wait(waiting, timeout=4.0)
    assert not any(run.done() for run in waiting), "a leader that renews keeps its seat"
    assert follower.seat is not None
    assert follower.seat.url == ("http://0" if leader is one else "http://1")
    assert (leader.leads, follower.leads) == (True, False)
    holding.cancel()
    await asyncio.gather(*waiting)
    assert (leader.leads, follower.leads) == (False, True), "known before it asked"
    await leader.hold(lost.set)
    assert lost.is_set(), "who was silent for a lease finds out that another leads"
    await follower.resign()
    await asyncio.wait_for(leader.campaign(), 20.0)


async def test_a_standby_tells_who_leads_and_takes_over_with_every_sandbox(tmp_path: Path, store_url: str) -> None:
    first, second = (ControllerProcess(tmp_path, settings=LEASE, store_url=store_url) for _ in range(2))
    await first.start()
    client = SandboxClient(f"{first.url},{second.url}", token=TOKEN, patience_s=60.0)
    made = await client.create(SandboxSpec(files={"a": "kept"}), owner="o", key="1")
    await second.start()
    standby = Service(second.url, token=TOKEN)
    await told(standby, first.url)
    assert not await standby.healthy()
    assert (await standby.request("GET", "/healthz")).json()["status"] == "ok", "alive, though not ready"

    await first.signal(signal.SIGKILL)
    sandbox = client.handle(made.id)
    assert await sandbox.read("a") == b"kept"
    assert (await sandbox.exec(sh("echo on"))).stdout == b"on\n"
    assert len(fork_server(tmp_path).children()) == 1

    await first.start()
    back = Service(first.url, token=TOKEN)
    await told(back, second.url)
    await second.signal(signal.SIGTERM)
    assert await sandbox.read("a") == b"kept", "a leader that is stopped hands over"
    assert [view.id for view in await client.list()] == [made.id]

    os.kill(first.pid, signal.SIGSTOP)
    await second.start()
    await leads(standby)
    third = SandboxClient(second.url, token=TOKEN, patience_s=60.0)
    assert (await third.handle(made.id).exec(sh("echo third"))).stdout == b"third\n"
    since = await third.create(SandboxSpec(), owner="o", key="since")
    os.kill(first.pid, signal.SIGCONT)
    assert await first.wait() == LOST_LEADERSHIP, "a leader that slept through its lease ends"
    assert (await third.handle(since.id).exec(sh("echo left"))).stdout == b"left\n", "it swept nothing on its way out"
    await third.handle(since.id).close()
    await third.handle(made.id).close()
    assert not fork_server(tmp_path).children()
    await second.signal(signal.SIGTERM)
    fork_server(tmp_path).kill()
    for service in (standby, back, client, third):
        await service.close()


async def leads(service: Service) -> None:
    for _ in range(600):
        if await service.healthy():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{service.base_url} did not come to lead")


async def told(standby: Service, leader: str) -> None:
    """Wait until a standby refuses in favour of `leader`."""
    for _ in range(600):
        with pytest.raises(ServiceUnavailable) as refused:
            await standby.request("GET", "/v1/sandboxes")
        assert refused.value.ran is Ran.NO
        if refused.value.detail.get("leader") == leader:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{standby.base_url} did not become a standby of {leader}")
