"""Creation, renewal and deletion of real sandboxes at every moment: cancelled, raced, replayed, in every state."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sandboxes import SPEC, end_runtime, sandbox_config, service, sh
from stepping import cancelled_at

from agentrl.core.errors import Conflict, SandboxError, SandboxLost
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox.client import RemoteSandbox, SandboxClient


async def test_a_create_cancelled_at_any_await_leaks_nothing(backend: str, tmp_path: Path) -> None:
    async with service(tmp_path, sandbox_config(backend, bare=True)) as client:

        async def acquire(key: str) -> None:
            async with client.acquire(SPEC, owner="test", key=key):
                pass

        number, cancelled = 0, [True]
        while all(cancelled):
            numbers = range(number + 1, number + 5)
            number += 4
            cancelled = await asyncio.gather(*(cancelled_at(n, acquire(f"k{n}")) for n in numbers))
            await all_closed(client)
        assert cancelled[0] or number > 4
        assert not (await client.sweep()).orphans


async def all_closed(client: SandboxClient) -> None:
    """Wait for what goes on in the background, less long than a lease."""
    async with asyncio.timeout(20):
        while await client.list():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_the_environment_of_the_spec_is_that_of_commands(client: SandboxClient) -> None:
    spec = SPEC.model_copy(update={"env": {"COLOUR": "red", "HOME": "/tmp"}})
    async with client.acquire(spec, owner="test", key="environment") as sandbox:
        assert (await sandbox.exec(sh("echo $COLOUR $HOME"))).stdout == b"red /tmp\n"


async def test_a_creation_is_closed_while_it_runs(client: SandboxClient) -> None:
    creating = asyncio.create_task(client.create(SPEC, owner="test", key="k"))
    await asyncio.sleep(0.005)
    await client.send("DELETE", "/v1/sandboxes", params={"owner": "test", "key": "k"})
    with pytest.raises((SandboxLost, Conflict)):
        await use(client, await creating)
    (view,) = await client.list(live=False)
    assert view.state is SandboxState.CLOSED


async def use(client: SandboxClient, view: Any) -> None:
    await client.handle(view.id).exec(ExecRequest(argv=("true",)))


async def test_delete_works_in_every_state(client: SandboxClient, backend: str, tmp_path: Path) -> None:
    lost = (await client.create(SPEC, owner="test", key="lost")).id
    await end_runtime(backend, tmp_path, lost)
    with pytest.raises(SandboxLost):
        await client.handle(lost).exec(sh("sleep 30"))
    with pytest.raises(SandboxError):
        await client.create(SandboxSpec(files={"../x": ""}), owner="test", key="failed")
    await client.create(SPEC, owner="test", key="ready")
    if backend != "kubernetes":
        await client.handle((await client.create(SPEC, owner="test", key="paused")).id).pause()
    busy = (await client.create(SPEC, owner="test", key="busy")).id
    running = asyncio.create_task(client.handle(busy).exec(sh("sleep 30")))
    await client.handle(busy).exec(sh("true"))
    for view in await client.list(live=False):
        # Several at once: all but the first find it CLOSING, and those after that CLOSED.
        await asyncio.gather(*(client.handle(view.id).close() for _ in range(3)))
        await client.handle(view.id).close()
    with pytest.raises(SandboxLost):
        await running
    states = {view.id: view.state for view in await client.list(live=False)}
    assert states.pop(lost) is SandboxState.LOST
    assert Counter(states.values()) == {"FAILED": 1, "CLOSED": len(states) - 1}


async def test_a_renewal_that_races_the_sweep_makes_nothing_immortal(client: SandboxClient) -> None:
    chance = random.Random(0)

    async def race(key: str) -> RemoteSandbox:
        sandbox = client.handle((await client.create(SPEC, owner="test", key=key)).id)
        try:
            for _ in range(20):
                await sandbox.renew(0.2)
                await asyncio.sleep(chance.uniform(0.1, 0.5))
        except SandboxLost:
            pass
        return sandbox

    raced = await asyncio.gather(*(race(f"k{i}") for i in range(4)))
    await all_closed(client)
    for sandbox in raced:
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.renew(60.0)
    assert not await client.list()
    assert not (await client.sweep()).orphans


async def test_a_renewal_that_races_a_close_loses(client: SandboxClient) -> None:
    for i in range(3):
        sandbox = client.handle((await client.create(SPEC, owner="test", key=f"k{i}")).id)
        renewals = (sandbox.renew(60.0) for _ in range(5))
        await asyncio.gather(*renewals, sandbox.close(), sandbox.renew(60.0), return_exceptions=True)
        assert (await client.view(sandbox.id)).state is SandboxState.CLOSED
        assert not await client.list()


async def test_a_key_replayed_while_it_runs_waits_for_the_one_result(sandbox: RemoteSandbox) -> None:
    request = sh("echo run >> runs; sleep 0.5; wc -l < runs")
    results = await asyncio.gather(*(sandbox.exec(request, key="e") for _ in range(4)))
    assert [result.stdout.strip() for result in results] == [b"1"] * 4
    assert await sandbox.result("e") == results[0]
    with pytest.raises(Conflict):
        await sandbox.exec(sh("echo other"), key="e")
