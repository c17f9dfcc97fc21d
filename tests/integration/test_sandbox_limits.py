"""Cgroups of local sandboxes: they hold for the sandbox as a whole, and end with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from sandboxes import fork_server, local_service, sh

from agentrl.core.types import ExecRequest, SandboxLimits, SandboxSpec
from sandbox.backends.local import cgroups
from sandbox.client import SandboxClient

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


@pytest.fixture
def v2_folder() -> Iterator[Path]:
    """A cgroup of ours in the v2 hierarchy, also where v1 has the controllers."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    points = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    folder = Path(points[0] if points else "/nowhere") / f"agentrl-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may make no cgroup in the v2 hierarchy here: {error}")
    yield folder
    folder.rmdir()


async def test_a_v2_cgroup_freezes_and_thaws(v2_folder: Path) -> None:
    groups = cgroups.Cgroups(dict.fromkeys(cgroups.CONTROLLERS, str(v2_folder)), unified=True)
    (v2_folder / "sb-one").mkdir()
    loop = psutil.Popen(["sh", "-c", "while :; do :; done"])
    try:
        (v2_folder / "sb-one" / "cgroup.procs").write_text(str(loop.pid))
        groups.freeze("sb-one", within_s=10.0)
        before = loop.cpu_times()
        await asyncio.sleep(0.3)
        assert loop.cpu_times() == before
        groups.thaw("sb-one")
        async with asyncio.timeout(20):
            while loop.cpu_times() == before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        loop.kill()
        await asyncio.to_thread(loop.wait)
    groups.remove("sb-one")
    async with asyncio.timeout(20):
        while groups.leftover:
            groups.retry()
            await asyncio.sleep(0.02)
    assert not (v2_folder / "sb-one").exists()
