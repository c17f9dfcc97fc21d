"""Pause, resume, snapshot and fork wherever sandboxes are; a backend that cannot refuses, with nothing changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sandboxes import SPEC, sandbox_config, service, sh

from agentrl.core.errors import Conflict, NotFound, Ran, SandboxLost, Unsupported
from agentrl.core.types import ExecRequest, ProcessRequest, SandboxState
from agentrl.testing.sandbox import InMemorySandboxes

PAUSES = ("memory", "local", "docker")
"""Where sandboxes can be paused."""
KEEPS = ("memory", "local", "docker")
"""Where they can be kept in snapshots."""
REFUSES_PAUSE = REFUSES_SNAPSHOT = ("kubernetes",)
NOTE = ExecRequest(argv=("cat", "note.txt"))


@asynccontextmanager
async def place(name: str, folder: Path) -> AsyncIterator[Any]:
    if name == "memory":
        yield InMemorySandboxes()
    else:
        async with service(folder, sandbox_config(name)) as client:
            yield client


def on(names: tuple[str, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await true():  # noqa: ASYNC110 what is looked at is elsewhere
            await asyncio.sleep(0.02)


@on(REFUSES_PAUSE)
async def test_a_backend_that_cannot_pause_says_so(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        with pytest.raises(Unsupported) as refused:
            await sandbox.pause()
        assert refused.value.ran is Ran.NO
        assert (await sandbox.exec(NOTE)).stdout == b"hello\n"


@on(REFUSES_SNAPSHOT)
async def test_a_backend_that_cannot_keep_says_so(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        with pytest.raises(Unsupported):
            await sandbox.snapshot()
        with pytest.raises(Unsupported):
            async with sandbox.fork():
                pass
        assert not await sandboxes.snapshots()
        assert (await sandbox.exec(NOTE)).stdout == b"hello\n"


@on(PAUSES)
async def test_commands_are_refused_until_the_resume(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        await sandbox.pause(key="p")
        assert [view.state for view in await sandboxes.list()] == [SandboxState.PAUSED]
        for call in (sandbox.exec(NOTE), sandbox.read("note.txt"), sandbox.write("a", b"b")):
            with pytest.raises(Conflict, match="PAUSED: resume it") as refused:
                await call
            assert refused.value.ran is Ran.NO
        await sandbox.renew(60.0)
        await sandbox.resume(key="r")
        await sandbox.pause(key="p")
        assert (await sandbox.exec(NOTE)).stdout == b"hello\n", "a late retry of the pause must not pause again"
        with pytest.raises(Conflict):
            await sandbox.resume(key="p")


@on(PAUSES)
async def test_a_paused_sandbox_ends_by_its_lease_and_by_a_close(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        await sandbox.pause(ttl_s=0.3)
        async with sandboxes.acquire(SPEC, owner="test", key="two") as another:
            await another.pause()
        await until(lambda: _none(sandboxes))
        with pytest.raises(SandboxLost, match="the lease ended"):
            await sandbox.exec(NOTE)


async def _none(sandboxes: Any) -> bool:
    return not await sandboxes.list()


@on(tuple(name for name in PAUSES if name != "memory"))
async def test_nothing_runs_while_it_is_paused(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        count = ProcessRequest(argv=("sh", "-c", "while :; do echo; sleep 0.01; done"))
        await sandbox.start(count, key="count")

        async def counted(more_than: int) -> bool:
            return (await sandbox.process("count")).stdout_total > more_than

        await until(lambda: counted(0))
        look = asyncio.create_task(sandbox.output("count", stream="stderr", wait_s=60.0))
        await asyncio.sleep(0.05)
        await sandbox.pause()
        with pytest.raises(Conflict, match="paused"):
            await asyncio.wait_for(look, 10)
        await asyncio.sleep(1.0)
        await sandbox.resume()
        now = await sandbox.process("count")
        assert now.status == "RUNNING"
        assert now.stdout_total < 100 * (now.duration_s - 0.9), "it cannot have counted all the while"
        await until(lambda: counted(now.stdout_total))


@on(KEEPS)
async def test_others_begin_from_a_snapshot(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes:
        async with sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
            await sandbox.write("sub/made.bin", bytes(range(256)))
            snapshot = await sandbox.snapshot(key="s", ttl_s=60.0)
            assert await sandbox.snapshot(key="s", ttl_s=60.0) == snapshot
            with pytest.raises(Conflict):
                await sandbox.snapshot(key="s", ttl_s=61.0)
            await sandbox.write("sub/made.bin", b"changed later")
            assert list(await sandboxes.snapshots(owner="test")) == [snapshot]
        spec = SPEC.model_copy(update={"snapshot": snapshot.id, "files": {"note.txt": "of the spec\n"}})
        async with sandboxes.acquire(spec, owner="test", key="two") as another:
            assert await another.read("sub/made.bin") == bytes(range(256))
            assert (await another.exec(NOTE)).stdout == b"of the spec\n"
            await sandboxes.forget_snapshot(snapshot.id)
            assert await another.read("sub/made.bin") == bytes(range(256))
        assert not await sandboxes.snapshots()
        with pytest.raises(NotFound, match="nothing was made"):
            async with sandboxes.acquire(spec, owner="test", key="three"):
                pass


@on(KEEPS)
async def test_a_snapshot_ends_with_its_time(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        await sandbox.snapshot(ttl_s=0.1)

        async def gone() -> bool:
            return not await sandboxes.snapshots()

        await until(gone)


@on(KEEPS)
async def test_forks_are_apart(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes:
        async with sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
            await sandbox.write("common", b"1")
            async with sandbox.fork(key="f") as one, sandbox.fork() as two:
                assert len({sandbox.id, one.id, two.id}) == 3
                await one.write("common", b"2")
                assert [await box.read("common") for box in (sandbox, one, two)] == [b"1", b"2", b"1"]
                assert (await two.exec(NOTE)).stdout == b"hello\n"
        assert not await sandboxes.list()
        assert not await sandboxes.snapshots()


@on(tuple(name for name in KEEPS if name in PAUSES))
async def test_a_paused_sandbox_is_kept_as_it_is(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        await sandbox.pause()
        snapshot = await sandbox.snapshot(ttl_s=60.0)
        assert [view.state for view in await sandboxes.list()] == [SandboxState.PAUSED]
        spec = SPEC.model_copy(update={"snapshot": snapshot.id, "files": {}})
        async with sandboxes.acquire(spec, owner="test", key="two") as another:
            assert (await another.exec(NOTE)).stdout == b"hello\n"


@on(tuple(name for name in KEEPS if name != "memory"))
async def test_what_a_command_made_is_in_the_snapshot(name: str, tmp_path: Path) -> None:
    make = "mkdir -p deep/er; echo x >deep/er/file; chmod 750 deep; ln -s er/file deep/link; echo t >/tmp/t"
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        await sandbox.exec(sh(make))
        async with sandbox.fork() as fork:
            look = await fork.exec(sh("cat deep/link; stat -c %a deep; readlink deep/link; cat /tmp/t"))
            assert look.stdout == b"x\n750\ner/file\nt\n"


@on(tuple(name for name in KEEPS if name != "memory"))
async def test_a_fork_has_every_file_however_many(name: str, tmp_path: Path) -> None:
    async with place(name, tmp_path) as sandboxes, sandboxes.acquire(SPEC, owner="test", key="one") as sandbox:
        for count in range(1, 9):
            await sandbox.write(f"{count}.txt", b"x" * 500)
            async with sandbox.fork() as fork:
                assert (await fork.exec(sh("ls | wc -l"))).stdout.split() == [str(count + 1).encode()]
