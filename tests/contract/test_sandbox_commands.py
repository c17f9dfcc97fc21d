"""Commands in real sandboxes: results, environments, timeouts, and what becomes of their processes."""

from __future__ import annotations

import asyncio
import time

import pytest
from sandboxes import pids, sh

from agentrl.core.errors import Blame, Ran, SandboxError
from agentrl.core.protocols import Sandbox
from agentrl.core.types import ExecRequest


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


async def test_timeout_of_one_that_ignores_term(sandbox: Sandbox) -> None:
    result = await sandbox.exec(sh("trap '' TERM; while true; do echo x; sleep 0.1; done", timeout_s=0.3))
    assert (result.status, result.signal) == ("TIMEOUT", 9)
    assert result.stdout.startswith(b"x\n")
    assert await pids(sandbox, "sh") == []


async def test_timeout_spares_other_commands_and_their_children(sandbox: Sandbox) -> None:
    await sandbox.exec(sh("setsid sleep 2001 >/dev/null 2>&1 & true"))
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


async def test_zombies_are_reaped(sandbox: Sandbox) -> None:
    await sandbox.exec(sh("for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.05' &) ; done"))
    await asyncio.sleep(0.3)
    states = (await sandbox.exec(sh("cat /proc/[0-9]*/stat"))).stdout
    assert b") Z " not in states
