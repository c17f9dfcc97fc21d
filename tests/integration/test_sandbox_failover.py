"""A leader is killed while clients work: the standby takes over, and no client loses or repeats a command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sandboxes import TOKEN, ControllerProcess, fork_server, sh

from agentrl.core.errors import Conflict, Ran, ServiceUnavailable
from agentrl.core.http import Service
from agentrl.core.types import ProcessRequest, SandboxSpec, SandboxState
from sandbox.client import RemoteSandbox, SandboxClient
from sandbox.following import RemoteProcess

LEASE = {"leader_lease_s": 6.0}
WORKERS = 6
SPEC = SandboxSpec(ttl_s=120.0)


class Worker:
    """A client that counts in its sandbox: a command that was lost or ran twice shows."""

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self.sandbox, self.count = sandbox, 0

    async def work(self, until: asyncio.Event) -> None:
        while not until.is_set():
            result = await self.sandbox.exec(sh("echo >>count; wc -l <count; sleep 0.05"))
            self.count += 1
            assert int(result.stdout) == self.count


@pytest.fixture
async def pair(tmp_path: Path, store_url: str) -> AsyncIterator[tuple[ControllerProcess, ControllerProcess]]:
    """A leader, and its standby, on one store."""
    first, second = (ControllerProcess(tmp_path / "run", settings=LEASE, store_url=store_url) for _ in range(2))
    await first.start()
    service = Service(first.url, token=TOKEN)
    await eventually(service.healthy)
    await second.start()
    await leads(first.url, second.url)
    yield first, second
    for controller in (first, second):
        await controller.signal(signal.SIGTERM)
    fork_server(tmp_path / "run").kill()
    await service.close()


async def eventually(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def leads(leader: str, standby: str) -> None:
    """Returns once the standby names the leader."""
    service = Service(standby, token=TOKEN, timeout_s=5.0)

    async def told() -> bool:
        try:
            await service.request("GET", "/v1/sandboxes")
        except ServiceUnavailable as refused:
            return refused.ran is Ran.NO and refused.detail.get("leader") == leader
        return False

    try:
        await eventually(told)
    finally:
        await service.close()


async def test_clients_carry_on_when_the_leader_is_killed(
    pair: tuple[ControllerProcess, ControllerProcess], tmp_path: Path
) -> None:
    first, second = pair
    client = SandboxClient(f"{first.url},{second.url}", token=TOKEN, patience_s=60.0)
    made = [await client.create(SPEC, owner="o", key=f"k{n}") for n in range(WORKERS)]
    workers = [Worker(client.handle(view.id)) for view in made]
    asleep = client.handle((await client.create(SPEC, owner="o", key="asleep")).id)
    await asleep.write("note", b"kept")
    kept = await asleep.snapshot(ttl_s=600.0)
    await asleep.pause(key="p")

    until = asyncio.Event()
    running = [asyncio.create_task(worker.work(until)) for worker in workers]
    async with client.handle(made[0].id).running(
        ProcessRequest(argv=("sh", "-c", "for i in $(seq 1 400); do echo $i; sleep 0.05; done"))
    ) as process:
        output = asyncio.create_task(collect(process))
        await eventually(lambda: worked(workers, 5))
        await first.signal(signal.SIGKILL)
        before = [worker.count for worker in workers]
        another = await client.create(SPEC, owner="o", key="during")
        await eventually(lambda: worked(workers, max(before) + 5))

        await first.start()
        await leads(second.url, first.url)
        until.set()
        await asyncio.gather(*running)
        assert await output == b"".join(b"%d\n" % i for i in range(1, 401)), "output comes whole over the change"

    live = {view.id: view.state for view in await client.list()}
    assert live.pop(asleep.id) is SandboxState.PAUSED
    assert live == dict.fromkeys([another.id, *(view.id for view in made)], SandboxState.READY)
    assert len(fork_server(tmp_path / "run").children()) == WORKERS + 2
    with pytest.raises(Conflict, match="PAUSED"):
        await asleep.read("note")
    await asleep.resume()
    await asleep.pause(key="p")
    assert await asleep.read("note") == b"kept", "the key of the pause is known to the new leader"
    assert list(await client.snapshots()) == [kept]
    async with client.acquire(SandboxSpec(snapshot=kept.id), owner="o", key="fork") as fork:
        assert await fork.read("note") == b"kept"

    page = await client.events()
    assert [event.seq for event in page.events] == list(range(1, len(page.events) + 1))
    swept = await client.sweep()
    assert (swept.lost, swept.orphans) == (0, 0)
    for sandbox_id in [asleep.id, *live]:
        await client.handle(sandbox_id).close()
    await client.forget_snapshot(kept.id)
    assert not fork_server(tmp_path / "run").children()
    await client.close()


async def worked(workers: list[Worker], count: int) -> bool:
    return all(worker.count >= count for worker in workers)


async def collect(process: RemoteProcess) -> bytes:
    seen = b""
    async for piece in process.output():
        seen += piece.data
    return seen
