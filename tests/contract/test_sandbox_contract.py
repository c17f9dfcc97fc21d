"""What every place for sandboxes keeps: the in-memory double, and the local backend through HTTP and the client.

Tests of the first part need no processes and run against all; those of the second run against real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from sandboxes import sandbox_config, service, sh

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
from agentrl.core.protocols import Sandbox, Sandboxes
from agentrl.core.types import ExecRequest, SandboxLimits, SandboxSpec
from agentrl.testing.sandbox import InMemorySandboxes
from sandbox.client import RemoteSandbox

REAL = ("local", "docker")
SPEC = SandboxSpec(files={"note.txt": "hello\n"})


@asynccontextmanager
async def place(name: str, folder: Path) -> AsyncIterator[Sandboxes]:
    """The sandboxes called `name`, with room for 4."""
    if name == "memory":
        yield InMemorySandboxes(capacity=4, create_s=0.01)
    else:
        async with service(folder, sandbox_config(name, capacity=4)) as client:
            yield client


@pytest.fixture(params=["memory", *REAL])
async def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandboxes]:
    async with place(request.param, tmp_path) as found:
        yield found


@pytest.fixture(params=REAL)
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """One real sandbox."""
    async with place(request.param, tmp_path) as found, found.acquire(SPEC, owner="test", key="one") as made:
        yield made


# --- every place -------------------------------------------------------------------------------


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


# --- real processes ----------------------------------------------------------------------------


async def test_exit_codes_signals_and_both_streams(sandbox: Sandbox) -> None:
    result = await sandbox.exec(sh("cat; echo error >&2; exit 3", stdin=b"\x00\xff in"))
    assert (result.status, result.exit_code) == ("EXITED", 3)
    assert (result.stdout, result.stderr) == (b"\x00\xff in", b"error\n")
    killed = await sandbox.exec(sh("kill -9 $$"))
    assert (killed.status, killed.signal, killed.exit_code) == ("SIGNALED", 9, None)
    assert killed.duration_s > 0


async def test_environment_and_cwd_of_a_command(sandbox: Sandbox) -> None:
    request = ExecRequest(argv=("sh", "-c", "pwd; echo $COLOUR"), cwd="/tmp", env={"COLOUR": "red"})
    assert (await sandbox.exec(request)).stdout == b"/tmp\nred\n"


async def test_what_cannot_be_executed_is_an_error_not_a_result(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError) as missing:
        await sandbox.exec(ExecRequest(argv=("no-such-program",)))
    assert (missing.value.ran, missing.value.blame) == (Ran.NO, Blame.AGENT)
    with pytest.raises(SandboxError):
        await sandbox.exec(ExecRequest(argv=("true",), cwd="/nowhere"))


async def test_timeout_returns_partial_output_and_leaves_no_process(sandbox: Sandbox) -> None:
    forks = "echo partial; setsid sleep 1001 & (setsid sleep 1002 &) & env -i sleep 1003 & sleep 1004"
    started = time.monotonic()
    result = await sandbox.exec(sh(forks, timeout_s=0.3))
    assert (result.status, result.exit_code, result.stdout) == ("TIMEOUT", None, b"partial\n")
    assert time.monotonic() - started < 10
    assert await pids(sandbox, "sleep") == []


async def test_timeout_of_one_that_ignores_term(sandbox: Sandbox) -> None:
    result = await sandbox.exec(sh("trap '' TERM; while true; do echo x; sleep 0.1; done", timeout_s=0.3))
    assert (result.status, result.signal) == ("TIMEOUT", 9)
    assert result.stdout.startswith(b"x\n")
    assert await pids(sandbox, "sh") == []


async def test_timeout_spares_other_commands_and_their_children(sandbox: Sandbox) -> None:
    await sandbox.exec(sh("nohup sleep 2001 >/dev/null 2>&1 & true"))
    other = asyncio.create_task(sandbox.exec(sh("setsid sleep 2002 & sleep 0.8; echo whole")))
    await asyncio.sleep(0.1)
    assert (await sandbox.exec(sh("setsid sleep 2003 & sleep 2004", timeout_s=0.2))).status == "TIMEOUT"
    assert (await other).stdout == b"whole\n"
    assert await pids(sandbox, "sleep") == ["2001", "2002"]


async def test_a_background_child_that_holds_stdout_delays_nothing(sandbox: Sandbox) -> None:
    started = time.monotonic()
    result = await sandbox.exec(sh("(sleep 0.5; echo late; echo alive > /work/alive; sleep 60) & echo early"))
    assert result.stdout == b"early\n"
    assert time.monotonic() - started < 0.5
    waited = await sandbox.exec(sh("until [ -s alive ]; do sleep 0.05; done; cat alive", timeout_s=5))
    assert waited.stdout == b"alive\n"


async def test_large_stdin_and_output_arrive_whole(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20) * 12
    result = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data), timeout_s=60))
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    assert result.stdout_total == len(data)


async def test_output_over_the_cap_keeps_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.exec(sh("seq 1 200000; seq 1 3 >&2", cap_bytes=1000))
    whole = b"".join(b"%d\n" % i for i in range(1, 200001))
    assert result.stdout == whole[:500] + whole[-500:]
    assert (result.stdout_total, result.stderr) == (len(whole), b"1\n2\n3\n")


@pytest.mark.parametrize("backend", REAL)
async def test_close_works_in_every_state(backend: str, tmp_path: Path) -> None:
    async with service(tmp_path, sandbox_config(backend)) as client:
        async with client.acquire(SPEC, owner="test", key="busy") as sandbox:
            running = asyncio.create_task(sandbox.exec(ExecRequest(argv=("sleep", "30"))))
            await asyncio.sleep(0.1)
            await asyncio.gather(*(sandbox.close() for _ in range(3)))
            with pytest.raises(SandboxLost):
                await running
        with pytest.raises(SandboxError):
            async with client.acquire(SandboxSpec(files={"../x": ""}), owner="test", key="failed"):
                pass
        views = await client.list(live=False)
        assert {view.state for view in views} == {"CLOSED", "FAILED"}
        for view in views:
            await RemoteSandbox(client, view.id).close()
        assert await client.list(live=False) == views


async def test_zombies_are_reaped(sandbox: Sandbox) -> None:
    await sandbox.exec(sh("for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.05' &) ; done"))
    await asyncio.sleep(0.3)
    states = (await sandbox.exec(sh("cat /proc/[0-9]*/stat"))).stdout
    assert b") Z " not in states


async def test_kill_everything_inside_kills_no_runtime(sandbox: Sandbox) -> None:
    await sandbox.exec(sh("kill -9 1; kill -9 -1", timeout_s=5))
    assert (await sandbox.exec(sh("echo alive"))).stdout == b"alive\n"


@pytest.mark.parametrize("backend", REAL)
async def test_processes_and_memory_and_disk_are_limited(backend: str, tmp_path: Path) -> None:
    spec = SandboxSpec(limits=SandboxLimits(pids=20, memory_mb=128, disk_mb=8))
    async with (
        service(tmp_path, sandbox_config(backend)) as client,
        client.acquire(spec, owner="test", key="k") as sandbox,
    ):
        eaten = await sandbox.exec(ExecRequest(argv=("python3", "-c", "b = b'x' * (1 << 28)")))
        # Without a memory cgroup, an allocation fails; with one, the kernel kills.
        assert eaten.status == "OOM" or b"MemoryError" in eaten.stderr
        full = await sandbox.exec(sh("head -c 16000000 /dev/zero > big"))
        assert full.exit_code != 0
        assert b"No space left" in full.stderr
        forks = await sandbox.exec(sh("for i in $(seq 50); do sleep 1003 & done; wait", timeout_s=1))
        assert b"fork" in forks.stderr


async def pids(sandbox: Sandbox, program: str) -> list[str]:
    """The last argument of every live process of a program, this question's own left out."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
    lines = (await sandbox.exec(sh(script))).stdout.decode().splitlines()
    return sorted(words[-1] for line in lines if (words := line.split()) and words[0] == program and script not in line)
