"""What every place for sandboxes keeps, the in-memory double and the backends: keys, leases, capacity, closing."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import pytest
from sandboxes import SPEC, sh

from agentrl.core.errors import (
    Blame,
    CapacityError,
    Conflict,
    NotFound,
    Ran,
    SandboxError,
    SandboxFileError,
    SandboxLost,
)
from agentrl.core.protocols import Sandboxes
from agentrl.core.types import ExecRequest, SandboxSpec


async def test_a_command_runs_in_the_workdir_with_the_files_of_the_spec(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC, owner="test", key="k") as sandbox:
        result = await sandbox.exec(ExecRequest(argv=("cat", "note.txt")))
        assert (result.status, result.exit_code, result.stdout) == ("EXITED", 0, b"hello\n")
        assert result.stdout_total == 6
        failed = await sandbox.exec(ExecRequest(argv=("false",)))
        assert (failed.status, failed.exit_code) == ("EXITED", 1)


async def test_files_are_bytes(sandboxes: Sandboxes) -> None:
    data = bytes(range(256)) * 10
    async with sandboxes.acquire(SPEC, owner="test", key="k") as sandbox:
        await sandbox.write("deep/er/data.bin", data)
        assert await sandbox.read("deep/er/data.bin") == data
        assert await sandbox.read("/work/deep/er/data.bin") == data
        await sandbox.write("deep/er/data.bin", b"short")
        assert await sandbox.read("deep/er/data.bin") == b"short"
        with pytest.raises(SandboxFileError) as missing:
            await sandbox.read("nothing here")
        assert missing.value.blame is Blame.AGENT


async def test_relative_paths_stay_inside_the_workdir(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC, owner="test", key="k") as sandbox:
        for path in ("../etc/passwd", "a/../../etc/passwd", ".."):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)
            with pytest.raises(SandboxFileError):
                await sandbox.write(path, b"x")


async def test_after_the_block_the_sandbox_is_closed(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC, owner="test", key="k") as sandbox:
        assert [view.id for view in await sandboxes.list(owner="test")] == [sandbox.id]
        assert await sandboxes.list(owner="another") in ((), [])
        assert (await sandboxes.get(sandbox.id)).id == sandbox.id
    assert not await sandboxes.list()
    (view,) = await sandboxes.list(owner="test", live=False)
    assert (view.id, view.state) == (sandbox.id, "CLOSED")
    for call in (sandbox.exec(sh("true")), sandbox.read("note.txt"), sandbox.renew(10.0), sandboxes.get(sandbox.id)):
        with pytest.raises(SandboxLost) as lost:
            await call
        assert lost.value.ran is Ran.NO
    await sandbox.close()
    await sandbox.close()


async def test_an_error_in_the_block_closes_too(sandboxes: Sandboxes) -> None:
    with pytest.raises(ZeroDivisionError):
        async with sandboxes.acquire(SPEC, owner="test", key="k"):
            raise ZeroDivisionError
    assert not await sandboxes.list()


async def test_a_key_creates_once(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC, owner="test", key="k") as first:
        async with sandboxes.acquire(SPEC, owner="other", key="k") as other:
            assert other.id != first.id
        with pytest.raises(Conflict):
            async with sandboxes.acquire(SandboxSpec(files={"other": ""}), owner="test", key="k"):
                pass
        assert [view.id for view in await sandboxes.list()] == [first.id]
        async with sandboxes.acquire(SPEC, owner="test", key="k") as again:
            assert again.id == first.id
    with pytest.raises(SandboxLost):
        async with sandboxes.acquire(SPEC, owner="test", key="k"):
            pass


async def test_an_exec_key_runs_once(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC, owner="test", key="k") as sandbox:
        first = await sandbox.exec(ExecRequest(argv=("echo", "a")), key="e")
        assert await sandbox.exec(ExecRequest(argv=("echo", "a")), key="e") == first
        with pytest.raises(Conflict):
            await sandbox.exec(ExecRequest(argv=("echo", "b")), key="e")


async def test_beyond_capacity_is_refused_at_once(sandboxes: Sandboxes) -> None:
    async with AsyncExitStack() as stack:
        for i in range(4):
            await stack.enter_async_context(sandboxes.acquire(SPEC, owner="test", key=f"k{i}"))
        with pytest.raises(CapacityError) as refused:
            async with sandboxes.acquire(SPEC, owner="test", key="k4"):
                pass
        assert refused.value.retry_after_s > 0
    async with sandboxes.acquire(SPEC, owner="test", key="k4"):
        assert len(await sandboxes.list()) == 1


async def test_a_lease_ends_without_renewal_and_reads_do_not_renew(sandboxes: Sandboxes) -> None:
    spec = SPEC.model_copy(update={"ttl_s": 0.7})
    async with sandboxes.acquire(spec, owner="test", key="k") as sandbox:
        await sandbox.renew(1.0)
        for _ in range(20):
            with contextlib.suppress(SandboxLost):
                await sandbox.read("note.txt")
            await asyncio.sleep(0.1)
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.read("note.txt")


async def test_commands_and_renewals_extend_a_lease(sandboxes: Sandboxes) -> None:
    async with sandboxes.acquire(SPEC.model_copy(update={"ttl_s": 1.0}), owner="test", key="k") as sandbox:
        for _ in range(8):
            await asyncio.sleep(0.2)
            await sandbox.exec(ExecRequest(argv=("true",)))
        await sandbox.renew(100.0)
        await asyncio.sleep(1.5)
        assert await sandbox.read("note.txt") == b"hello\n"


async def test_a_spec_that_cannot_be_carried_out_leaves_nothing(sandboxes: Sandboxes) -> None:
    with pytest.raises(SandboxError, match="leads out"):
        async with sandboxes.acquire(SandboxSpec(files={"../escape": "x"}), owner="test", key="k"):
            pass
    assert not await sandboxes.list()


async def test_unknown_sandbox(sandboxes: Sandboxes) -> None:
    with pytest.raises(NotFound):
        await sandboxes.get("sb-of-nobody")


@pytest.mark.parametrize("after_ms", [0, 1, 2, 4, 8, 16, 32, 64])
async def test_a_cancelled_acquire_leaks_nothing(sandboxes: Sandboxes, after_ms: int) -> None:
    async def hold() -> None:
        async with sandboxes.acquire(SPEC, owner="test", key="k"):
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await asyncio.sleep(after_ms / 1000)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await sandboxes.list()
