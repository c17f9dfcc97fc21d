"""Processes that are followed, and shells, in real sandboxes."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest
from sandboxes import sh

from agentrl.core.errors import Blame, Conflict, NotFound, Ran, SandboxError, SandboxLost
from agentrl.core.protocols import ProcessSandbox
from agentrl.core.types import ProcessRequest
from sandbox.client import RemoteSandbox


def shell(script: str, *, interactive: bool = False) -> ProcessRequest:
    return ProcessRequest(argv=("sh", "-c", script), interactive=interactive)


async def whole(sandbox: ProcessSandbox, process_id: str) -> bytes:
    found = b""
    while True:
        chunk = await sandbox.output(process_id, offset=len(found), wait_s=20)
        assert chunk.offset == len(found)
        found += chunk.data
        if chunk.ended:
            return found


async def test_a_process_is_started_followed_fed_and_waited_for(sandbox: RemoteSandbox) -> None:
    started = await sandbox.start(shell("echo ready; cat; exit 7", interactive=True), key="a/b c")
    assert (started.id, started.status) == ("a/b c", "RUNNING")
    assert (await sandbox.output("a/b c", wait_s=20)).data == b"ready\n"
    await sandbox.send_input("a/b c", b"one ")
    await sandbox.send_input("a/b c", b"two", last=True)
    assert await whole(sandbox, "a/b c") == b"ready\none two"
    ended = await sandbox.process("a/b c", wait_s=20)
    assert (ended.status, ended.exit_code) == ("EXITED", 7)
    with pytest.raises(Conflict):
        await sandbox.send_input("a/b c", b"late")
    with pytest.raises(NotFound):
        await sandbox.process("unknown")
    with pytest.raises(Conflict):
        await sandbox.start(shell("other"), key="a/b c")
    assert [view.id for view in await sandbox.processes()] == ["a/b c"]


async def test_large_output_is_followed_whole(sandbox: RemoteSandbox) -> None:
    data = os.urandom(1 << 20) * 12
    await sandbox.write("data", data)
    started = await sandbox.start(ProcessRequest(argv=("cat", "data"), keep_bytes=64 << 20))
    assert hashlib.sha256(await whole(sandbox, started.id)).digest() == hashlib.sha256(data).digest()


async def test_processes_outlive_commands_and_are_signalled(sandbox: RemoteSandbox) -> None:
    started = await sandbox.start(shell("setsid sleep 6601 & echo up; wait"))
    await sandbox.output(started.id, wait_s=20)
    timed_out = await sandbox.exec(sh("sleep 6602", timeout_s=0.2))
    assert timed_out.status == "TIMEOUT"
    assert (await sandbox.process(started.id)).status == "RUNNING"
    await sandbox.signal(started.id, signal.SIGKILL)
    ended = await sandbox.process(started.id, wait_s=20)
    assert (ended.status, ended.signal) == ("SIGNALED", 9)
    left = await sandbox.exec(sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
    assert b"sleep 66" not in left.stdout


async def test_a_process_of_a_closed_sandbox_is_lost(sandbox: RemoteSandbox) -> None:
    started = await sandbox.start(shell("sleep 600"))
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await sandbox.process(started.id)


async def test_a_shell_keeps_its_state_and_a_dead_one_says_so(sandbox: RemoteSandbox) -> None:
    opened = await sandbox.open_shell(env={"START": "here"}, key="my shell")
    assert (await opened.run("cd /tmp; echo $START; COUNT=1", key="a")).stdout == b"here\n"
    counted = await opened.run("COUNT=$((COUNT + 1)); pwd; echo $COUNT", key="b")
    assert counted.stdout == b"/tmp\n2\n"
    assert await opened.run("COUNT=$((COUNT + 1)); pwd; echo $COUNT", key="b") == counted
    other = await sandbox.open_shell()
    assert (await other.run("pwd; echo $COUNT")).stdout == b"/work\n\n"
    timed_out = await opened.run("echo begun; sleep 9901", timeout_s=0.3)
    assert (timed_out.status, timed_out.stdout) == ("TIMEOUT", b"begun\n")
    with pytest.raises(SandboxError, match="open another") as dead:
        await opened.run("echo more")
    assert (dead.value.blame, dead.value.ran) == (Blame.AGENT, Ran.NO)
    ended = await other.run("exit 6")
    assert (ended.status, ended.exit_code) == ("EXITED", 6)
    await other.close()
    left = await sandbox.exec(sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
    assert b"sleep 9901" not in left.stdout
