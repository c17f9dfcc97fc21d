"""What goes wrong inside a local sandbox gives its own typed result, never another: limits, kills, floods."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import fork_server, local_service, sh

from agentrl.core.types import ExecRequest, SandboxLimits, SandboxSpec
from sandbox.backends.local import cgroups
from sandbox.client import SandboxClient

EAT = "b = bytearray(1 << 30); b[::4096] = b'x' * len(b[::4096])"
LIMITS = SandboxLimits(memory_mb=96, disk_mb=32, pids=40, cpus=0.5)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with local_service(tmp_path) as made:
        yield made


@pytest.fixture
def needs_cgroups(tmp_path: Path) -> None:
    found, why = cgroups.claim(str(tmp_path))
    if found is None:
        pytest.skip(f"this user may make no cgroups here: {why}")
    found.close()


def spec(**limits: float) -> SandboxSpec:
    return SandboxSpec(limits=LIMITS.model_copy(update=limits))


@pytest.mark.usefixtures("needs_cgroups")
async def test_a_kill_for_memory_is_oom_and_only_that(client: SandboxClient) -> None:
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        eater = ExecRequest(argv=("python3", "-c", EAT))
        assert (await sandbox.exec(eater)).status == "OOM"
        by_shell = await sandbox.exec(sh(f'python3 -c "{EAT}"; code=$?; exit $code'))
        assert (by_shell.status, by_shell.signal, by_shell.exit_code) == ("OOM", 9, None)
        survived = await sandbox.exec(sh(f'python3 -c "{EAT}"; echo after'))
        assert (survived.status, survived.exit_code, survived.stdout) == ("EXITED", 0, b"after\n")
        # An earlier kill for memory does not make this one so.
        killed = await sandbox.exec(sh("kill -9 $$"))
        assert (killed.status, killed.signal) == ("SIGNALED", 9)


@pytest.mark.usefixtures("needs_cgroups")
async def test_memory_is_limited_for_the_sandbox_as_a_whole(client: SandboxClient) -> None:
    half = "b = bytearray(90 << 20); b[::4096] = b'x' * len(b[::4096]); import time; time.sleep(3)"
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        both = await asyncio.gather(*(sandbox.exec(ExecRequest(argv=("python3", "-c", half))) for _ in range(2)))
        assert sorted(result.status for result in both) == ["EXITED", "OOM"]


@pytest.mark.usefixtures("needs_cgroups")
async def test_a_cpu_share_is_a_share(client: SandboxClient) -> None:
    script = "import os, time; t = time.time()\nwhile time.time() < t + 2: pass\nprint(sum(os.times()[:2]))"
    async with client.acquire(spec(cpus=0.2), owner="test", key="k") as sandbox:
        used = float((await sandbox.exec(ExecRequest(argv=("python3", "-c", script)))).stdout)
        assert used < 1.0


async def test_a_fork_bomb_is_contained(client: SandboxClient) -> None:
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


async def test_a_full_disk_is_the_commands_own_error(client: SandboxClient) -> None:
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        full = await sandbox.exec(sh("head -c 64000000 /dev/zero > big"))
        assert (full.status, full.exit_code) == ("EXITED", 1)
        assert b"No space left on device" in full.stderr
        assert (await sandbox.exec(sh("rm big; echo room > small; cat small"))).stdout == b"room\n"


async def test_the_root_survives_rm_and_the_runtime_a_kill_of_everything(client: SandboxClient) -> None:
    async with client.acquire(spec(), owner="test", key="k") as sandbox:
        removed = await sandbox.exec(sh("rm -rf /bin /usr/bin 2>/dev/null; echo $?"))
        assert removed.stdout == b"1\n"
        await sandbox.exec(sh("kill -9 -1"))
        assert (await sandbox.exec(sh("echo alive"))).stdout == b"alive\n"


async def test_48_mib_of_input_and_output_arrive_whole(client: SandboxClient) -> None:
    data = os.urandom(1 << 20) * 48
    async with client.acquire(SandboxSpec(limits=SandboxLimits(memory_mb=1024)), owner="test", key="k") as sandbox:
        result = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data), timeout_s=120))
        assert (result.status, result.stdout_total) == ("EXITED", len(data))
        assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
        capped = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=1000, timeout_s=120))
        assert (capped.stdout, capped.stdout_total) == (data[:500] + data[-500:], len(data))


@pytest.mark.usefixtures("needs_cgroups")
async def test_cgroups_end_with_their_sandboxes(tmp_path: Path) -> None:
    def ours() -> set[str]:
        name = cgroups.name_of(str((tmp_path / "sandbox").resolve()))
        found = {path for path in Path("/sys/fs/cgroup").glob(f"**/{name}/sb-*") if path.is_dir()}
        return {path.name for path in found}

    async with local_service(tmp_path) as client:
        async with client.acquire(spec(), owner="test", key="k") as sandbox:
            await sandbox.exec(sh("(setsid sleep 7701 &)"))
            assert ours() == {sandbox.id}
        for _ in range(100):
            if not ours():
                break
            await asyncio.sleep(0.05)
        assert ours() == set()
        async with client.acquire(spec(), owner="test", key="left"):
            fork_server(tmp_path).kill()
    async with local_service(tmp_path) as client, client.acquire(spec(), owner="test", key="next") as sandbox:
        assert ours() == {sandbox.id}
    assert ours() == set()
