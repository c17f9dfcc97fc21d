"""What goes wrong inside a sandbox gives its own typed result or error on every backend, and never another."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
from pathlib import Path

import pytest
from sandboxes import end_runtime, pids, sandbox_config, service, sh

from agentrl.core.errors import Blame, Ran, SandboxError, SandboxFileError, SandboxLost
from agentrl.core.types import ExecRequest, ProcessRequest, ProcessView, SandboxLimits, SandboxSpec, SandboxState
from sandbox.client import RemoteSandbox, SandboxClient

LIMITS = SandboxLimits(memory_mb=96, disk_mb=32, pids=40, cpus=0.5)
EAT = "b = bytearray(1 << 30); b[::4096] = b'x' * len(b[::4096])"
FILL_SHARED_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
while True:
    at = libc.shmat(libc.shmget(0, 8 << 20, 0o600), None, 0)
    ctypes.memset(at, 1, 8 << 20)
"""
"""Segments stay when the process that made them is killed, so that only the end of the sandbox frees them."""


def spec(**limits: float) -> SandboxSpec:
    return SandboxSpec(limits=LIMITS.model_copy(update=limits), ttl_s=60.0)


@pytest.mark.parametrize(
    "script",
    [
        "while :; do :; done",
        "setsid sh -c 'while :; do sleep 8801; done' & while :; do :; done",
        "(setsid sh -c '(sleep 8801; :) & :' &) ; while :; do :; done",
        "trap '' TERM; (trap '' TERM; sleep 8801) & while :; do :; done",
    ],
    ids=["plain", "setsid", "forked twice", "deaf to TERM"],
)
async def test_a_looping_command_is_timeout_and_leaves_no_process(sandbox: RemoteSandbox, script: str) -> None:
    result = await sandbox.exec(sh(f"echo partial; {script}", timeout_s=1))
    assert (result.status, result.exit_code, result.stdout) == ("TIMEOUT", None, b"partial\n")
    assert await pids(sandbox, "sleep") == []
    assert await pids(sandbox, "sh") == []


@pytest.mark.parametrize(
    "script",
    [
        "env -i setsid sleep 8806 & while :; do :; done",
        "(env -i setsid sh -c '(sleep 8806; :) & :' &) ; while :; do :; done",
    ],
    ids=["setsid", "forked twice"],
)
async def test_a_timeout_finds_who_cleared_its_environment_and_nobody_else(sandbox: RemoteSandbox, script: str) -> None:
    await sandbox.start(ProcessRequest(argv=("sh", "-c", "(setsid sleep 8807 &); exec sleep 8808")))
    ready = "until [ $(cat /proc/[0-9]*/comm | grep -c sleep) = 2 ]; do :; done"
    assert (await sandbox.exec(sh(ready))).exit_code == 0
    assert (await sandbox.exec(sh(script, timeout_s=1))).status == "TIMEOUT"
    assert await pids(sandbox, "sleep") == ["8807", "8808"]


async def test_a_timeout_comes_at_its_time_with_what_was_written(sandbox: RemoteSandbox) -> None:
    result = await sandbox.exec(sh("echo out; echo err >&2; sleep 5; echo late", timeout_s=2))
    assert (result.status, result.stdout, result.stderr) == ("TIMEOUT", b"out\n", b"err\n")
    assert 2.0 <= result.duration_s < 4.5
    assert (await sandbox.exec(sh("echo on"))).stdout == b"on\n"


async def test_rm_of_a_read_only_root_is_the_commands_own_error(sandbox: RemoteSandbox) -> None:
    removed = await sandbox.exec(sh("rm -rf /bin /usr/bin"))
    assert (removed.status, removed.exit_code) == ("EXITED", 1)
    assert (await sandbox.exec(sh("echo alive"))).stdout == b"alive\n"


async def test_a_killed_everything_is_signaled_and_the_runtime_stays(sandbox: RemoteSandbox) -> None:
    other = asyncio.create_task(sandbox.exec(sh("echo > begun; exec sleep 8802")))
    await sandbox.exec(sh("until [ -e begun ]; do sleep 0.02; done"))
    # -1 spares the caller itself, and nobody signals a namespace's init from within.
    killed = await sandbox.exec(sh("kill -9 1; kill -9 -1; echo left; kill -9 $$", timeout_s=5))
    assert (killed.status, killed.signal, killed.exit_code) == ("SIGNALED", 9, None)
    assert ((await other).status, (await other).signal) == ("SIGNALED", 9)
    assert (await sandbox.exec(sh("echo alive"))).stdout == b"alive\n"


async def test_a_fork_bomb_is_timeout_and_contained(client: SandboxClient) -> None:
    async with (
        client.acquire(spec(), owner="test", key="bomb") as sandbox,
        client.acquire(spec(), owner="test", key="other") as other,
    ):
        # The leader itself forks once only: where it could not, it would fail, and exit.
        script = "(bomb() { bomb | bomb & }; bomb) & while :; do :; done"
        bomb = asyncio.create_task(sandbox.exec(sh(script, timeout_s=1)))
        await asyncio.sleep(0.5)
        assert (await other.exec(sh("echo fine"))).stdout == b"fine\n"
        assert (await bomb).status == "TIMEOUT"
        left = await sandbox.exec(sh("ls -d /proc/[0-9]* | wc -l"))
        assert int(left.stdout) < 10


async def test_no_more_processes_is_the_agents_error(client: SandboxClient) -> None:
    async with client.acquire(spec(pids=12), owner="test", key="k") as sandbox:
        full = await sandbox.exec(sh("for i in $(seq 50); do sleep 8803 & done; wait", timeout_s=1))
        assert b"fork" in full.stderr
        starts = (sandbox.start(ProcessRequest(argv=("sleep", "8804"))) for _ in range(14))
        started = await asyncio.gather(*starts, return_exceptions=True)
        assert {type(start) for start in started} == {ProcessView, SandboxError}
        with pytest.raises(SandboxError, match="cannot execute") as refused:
            await sandbox.exec(ExecRequest(argv=("true",)))
        assert (refused.value.blame, refused.value.ran) == (Blame.AGENT, Ran.NO)


async def test_a_command_killed_for_memory_is_oom(client: SandboxClient, python: tuple[str, ...]) -> None:
    eat = shlex.join((*python, EAT))
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        direct = await sandbox.exec(ExecRequest(argv=(*python, EAT)))
        assert (direct.status, direct.signal, direct.exit_code) == ("OOM", 9, None)
        by_shell = await sandbox.exec(sh(f"{eat}; code=$?; exit $code"))
        assert (by_shell.status, by_shell.signal, by_shell.exit_code) == ("OOM", 9, None)
        survived = await sandbox.exec(sh(f"{eat}; echo after"))
        assert (survived.status, survived.exit_code, survived.stdout) == ("EXITED", 0, b"after\n")
        # An earlier kill for memory does not make this one so.
        killed = await sandbox.exec(sh("kill -9 $$"))
        assert (killed.status, killed.signal) == ("SIGNALED", 9)
        # Nor does that of another command at the same time.
        waiting = "while [ ! -e done ]; do sleep 0.02; done; kill -9 $$"
        beside = asyncio.create_task(sandbox.exec(sh(waiting)))
        eaten = await sandbox.exec(ExecRequest(argv=(*python, EAT)))
        await sandbox.write("done", b"")
        assert (eaten.status, (await beside).status) == ("OOM", "SIGNALED")


async def test_memory_that_no_kill_frees_ends_the_sandbox_with_that_cause(
    client: SandboxClient, python: tuple[str, ...]
) -> None:
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        assert (await sandbox.exec(ExecRequest(argv=(*python, FILL_SHARED_MEMORY)))).status == "OOM"
        # Now only the runtime is left to be killed when it takes in more.
        with pytest.raises(SandboxLost, match="out of memory"):
            await sandbox.write("more", b"x" * (16 << 20))
        assert (await client.view(sandbox.id)).state is SandboxState.LOST


async def test_a_full_disk_is_the_commands_own_error(client: SandboxClient) -> None:
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        full = await sandbox.exec(sh("dd if=/dev/zero of=big bs=1M count=64"))
        assert (full.status, full.exit_code) == ("EXITED", 1)
        assert b"No space left on device" in full.stderr
        with pytest.raises(SandboxFileError, match="No space left"):
            await sandbox.write("more", b"x" * (1 << 20))
        assert (await sandbox.exec(sh("rm big; echo room > small; cat small"))).stdout == b"room\n"


async def test_a_dead_shell_says_so(sandbox: RemoteSandbox) -> None:
    async def dies(command: str, *, timeout_s: float = 20.0) -> tuple[str, int | None, int | None]:
        shell = await sandbox.open_shell()
        ended = await shell.run(command, timeout_s=timeout_s)
        with pytest.raises(SandboxError, match="open another") as dead:
            await shell.run("echo more")
        assert (dead.value.blame, dead.value.ran) == (Blame.AGENT, Ran.NO)
        return ended.status, ended.exit_code, ended.signal

    assert await dies("exit 6") == ("EXITED", 6, None)
    assert await dies("kill -9 $$") == ("SIGNALED", None, 9)
    assert (await dies("sleep 8805", timeout_s=0.3))[0] == "TIMEOUT"
    assert await pids(sandbox, "sleep") == []


async def test_a_killed_runtime_is_a_lost_sandbox_with_the_cause(
    client: SandboxClient, sandbox: RemoteSandbox, backend: str, tmp_path: Path
) -> None:
    running = asyncio.create_task(sandbox.exec(sh("echo > begun; sleep 60", timeout_s=90)))
    await sandbox.exec(sh("until [ -e begun ]; do sleep 0.02; done"))
    await end_runtime(backend, tmp_path, sandbox.id)
    with pytest.raises(SandboxLost, match=r"killed|137") as lost:
        await running
    assert lost.value.ran is Ran.MAYBE
    with pytest.raises(SandboxLost, match=r"killed|137") as lost:
        await sandbox.exec(ExecRequest(argv=("true",)))
    assert lost.value.ran is Ran.NO
    assert (await client.view(sandbox.id)).state is SandboxState.LOST


async def test_48_mib_of_input_and_output_arrive_whole_or_capped(client: SandboxClient) -> None:
    data = os.urandom(1 << 20) * 48
    room = SandboxSpec(limits=SandboxLimits(memory_mb=1024), ttl_s=60.0)
    async with client.acquire(room, owner="test", key="k") as sandbox:
        result = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data), timeout_s=120))
        assert (result.status, result.stdout_total) == ("EXITED", len(data))
        assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
        capped = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=1000, timeout_s=120))
        assert (capped.stdout, capped.stdout_total) == (data[:500] + data[-500:], len(data))
        counted = await sandbox.exec(ExecRequest(argv=("sha256sum",), stdin=data, timeout_s=120))
        assert counted.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_rm_of_a_writable_root_is_an_error_of_the_next_command(tmp_path: Path) -> None:
    """Only containers with a root of their own can be broken like this; the runtime inside goes on."""
    config = sandbox_config("docker")
    writable = config.model_copy(update={"docker": config.docker.model_copy(update={"disk": "unlimited"})})
    async with service(tmp_path, writable) as client, client.acquire(spec(), owner="test", key="k") as sandbox:
        await sandbox.exec(sh("rm -rf /bin"))
        with pytest.raises(SandboxError, match="cannot execute") as broken:
            await sandbox.exec(sh("echo alive"))
        assert (broken.value.blame, broken.value.ran) == (Blame.AGENT, Ran.NO)
        await sandbox.write("kept", b"x")
        assert await sandbox.read("kept") == b"x"
