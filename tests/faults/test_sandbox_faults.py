"""The sandbox service when its processes are killed, and after hundreds of cycles: nothing lost, doubled or leaked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandboxes import TOKEN, ControllerProcess, fork_server, local_service, sh

from agentrl.core.errors import SandboxLost
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.backends.local import cgroups
from sandbox.backends.local.backend import LocalBackend
from sandbox.client import RemoteSandbox, SandboxClient

CYCLES = int(os.environ.get("AGENTRL_TEST_CYCLES", "1000"))
"""How often a sandbox is acquired, used and closed: 5000 take some minutes."""
NAP = str(100_000 + os.getpid())
"""Seconds that nobody else sleeps."""
SPEC = SandboxSpec(files={"note.txt": "hello\n"})


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[ControllerProcess]:
    process = ControllerProcess(tmp_path)
    await process.start()
    yield process
    await process.signal(signal.SIGTERM)
    assert not list((tmp_path / "sandbox").glob("sb-*")), "a graceful stop closes everything"


@pytest.fixture
async def client(controller: ControllerProcess) -> AsyncIterator[SandboxClient]:
    made = SandboxClient(controller.url, token=TOKEN)
    yield made
    await made.close()


async def test_killed_controller_adopts_its_sandboxes_again(
    controller: ControllerProcess, client: SandboxClient
) -> None:
    release, ready = asyncio.Event(), asyncio.Semaphore(0)
    held: list[RemoteSandbox] = []

    async def hold(i: int) -> bytes:
        async with client.acquire(SPEC, owner="test", key=f"k{i}") as sandbox:
            await sandbox.exec(sh(f"echo {i} > mine; echo run >> runs"))
            held.append(sandbox)
            ready.release()
            # Half of them have a command running while the controller is killed.
            if i % 2:
                await sandbox.exec(sh("echo start >> runs; sleep 3; echo end >> runs"), key=f"e{i}")
            await release.wait()
            return (await sandbox.exec(sh("cat mine runs"))).stdout

    tasks = [asyncio.create_task(hold(i)) for i in range(200)]
    for _ in tasks:
        await ready.acquire()
    await asyncio.sleep(0.5)
    assert await controller.signal(signal.SIGKILL) == -signal.SIGKILL
    before = {child.pid for child in fork_server(controller.folder).children()}
    assert len(before) == 200
    await controller.start()
    assert {view.id for view in await client.list()} == {sandbox.id for sandbox in held}
    assert {child.pid for child in fork_server(controller.folder).children()} == before
    release.set()
    outputs = await asyncio.gather(*tasks)
    for i, output in enumerate(outputs):
        runs = b"run\nstart\nend\n" if i % 2 else b"run\n"
        assert output == b"%d\n" % i + runs
    assert not await client.list()
    assert not fork_server(controller.folder).children()
    states = {view.state for view in await client.list(live=False)}
    assert states == {"CLOSED"}


async def test_a_sandbox_that_the_store_does_not_know_is_destroyed(tmp_path: Path) -> None:
    first, again = ControllerProcess(tmp_path), ControllerProcess(tmp_path)
    await first.start()
    client = SandboxClient(first.url, token=TOKEN)
    async with client.acquire(SPEC, owner="test", key="k"):
        await first.signal(signal.SIGKILL)
        for file in tmp_path.glob("sandbox.db*"):
            file.unlink()
        assert len(fork_server(tmp_path).children()) == 1
        again.port = first.port
        await again.start()
        assert not await client.list()
        assert not fork_server(tmp_path).children()
    await client.close()
    await again.signal(signal.SIGTERM)


async def test_killed_sandboxd_is_a_lost_sandbox_with_a_cause(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        running = asyncio.create_task(sandbox.exec(sh("sleep 60", timeout_s=90)))
        await sandbox.exec(ExecRequest(argv=("true",)))
        (init,) = fork_server(tmp_path).children()
        init.kill()
        with pytest.raises(SandboxLost, match="killed by signal 9"):
            await running
        with pytest.raises(SandboxLost, match="killed by signal 9"):
            await sandbox.exec(ExecRequest(argv=("true",)))
        (view,) = await client.list(live=False)
        assert (view.state, view.cause) == ("LOST", "sandboxd was killed by signal 9")


async def test_killed_fork_server_loses_its_sandboxes_and_is_replaced(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client:
        async with client.acquire(SPEC, owner="test", key="k") as sandbox:
            server = fork_server(tmp_path)
            children = server.children(recursive=True)
            server.kill()
            _, alive = psutil.wait_procs(children, timeout=5)
            assert not alive, "the kernel ends the sandboxes with their fork server"
            with pytest.raises(SandboxLost, match="the fork server ended"):
                await sandbox.exec(ExecRequest(argv=("true",)))
        async with client.acquire(SPEC, owner="test", key="next") as sandbox:
            assert await sandbox.read("note.txt") == b"hello\n"


async def test_a_fork_server_without_a_controller_outlives_its_last_sandbox_only_shortly(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandbox", idle_s=0.3)
    await backend.start(lambda sandbox_id, cause: None)
    await backend.create("sb-left-behind", SPEC.model_copy(update={"ttl_s": 0.5}), "test")
    server = fork_server(tmp_path)
    (init,) = server.children()
    await backend.detach()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [init, server], 20)
    assert not alive, "first the lease ends the sandbox, then the fork server ends itself"
    assert not list((tmp_path / "sandbox").glob("*.sock"))


@pytest.mark.timeout(300 + CYCLES // 5)
async def test_thousands_of_cycles_leak_nothing(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client:

        async def cycle(key: str) -> None:
            async with client.acquire(SPEC, owner="test", key=key) as sandbox:
                await sandbox.exec(sh(f"sleep {NAP} & (setsid sleep {NAP} &); cat note.txt"))

        async def cycles(worker: int, count: int) -> None:
            for i in range(count):
                await cycle(f"{worker}-{i}")

        await asyncio.gather(*(cycles(100 + worker, 2) for worker in range(10)))
        server = fork_server(tmp_path)
        before = await quiet(tmp_path, server)
        await asyncio.gather(*(cycles(worker, CYCLES // 10) for worker in range(10)))
        assert await quiet(tmp_path, server) == before
        assert rows(tmp_path) == (0, CYCLES + 20)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [server], 20)
    assert not alive


async def quiet(folder: Path, server: psutil.Process) -> dict[str, Any]:
    """What there is once everything that ended is reaped: it takes the kernel a moment."""
    async with asyncio.timeout(20):
        while server.children() or cgroup_folders(folder):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return {
        "files of the fork server": server.num_fds(),
        "our files": psutil.Process().num_fds(),
        # Those of others in its namespace, as of containers, go when their folders do.
        "mounts": Path(f"/proc/{server.pid}/mounts").read_text().count(str(folder)),
        "folders": sorted(os.listdir(folder / "sandbox")),
        "tasks": [process.pid for process in psutil.process_iter() if naps(process)],
    }


def cgroup_folders(folder: Path) -> list[Path]:
    name = cgroups.name_of(str((folder / "sandbox").resolve()))
    return list(Path("/sys/fs/cgroup").glob(f"**/{name}/sb-*"))


def rows(folder: Path) -> tuple[int, int]:
    """Sandboxes in the store: live ones, and all."""
    with contextlib.closing(sqlite3.connect(f"file:{folder}/sandbox.db?mode=ro", uri=True)) as store:
        (found,) = store.execute("SELECT coalesce(sum(ended_at = 0), 0), count(*) FROM sandboxes")
    return found


def naps(process: psutil.Process) -> bool:
    """Whether it is a `sleep` of this run's cycles."""
    try:
        return process.cmdline() == ["sleep", NAP]
    except psutil.Error:
        return False
