"""What is seldom: folders and times that few have, kills and closes at the wrong moment, on the local backend."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import NO_CGROUPS, NO_NAMESPACES, SPEC, fork_server, local_service, sh, under

from agentrl.core.types import ExecRequest, SandboxLimits, SandboxSpec
from sandbox.backends.local.backend import LocalBackend
from sandbox.client import SandboxClient

MAKE = r"""
import os
for name in (b"\xff\xfe", b"new\nline", b"a" * 255, b"-rf"):
    with open(name, "wb") as file:
        file.write(name)
os.symlink("/nowhere", "dangling")
open("empty", "w").close()
os.truncate("empty", 0)
with open("sparse", "wb") as file:
    file.truncate(3 << 20)
with open("closed", "w") as file:
    file.write("q")
os.chmod("closed", 0)
os.mkdir("shut")
with open("shut/in", "w") as file:
    file.write("z")
for year, name in enumerate(("empty", "sparse", "closed", "shut/in")):
    changed = (-5, 1 << 34, (1 << 63) - 1, -(1 << 63))[year] * 10**9
    os.utime(name, ns=(changed, changed))
os.utime("-rf", ns=(123456789012345678, 123456789012345678))
os.chmod("shut", 0)
os.system("mkdir -p " + "/".join(["d"] * 1200))
"""
LOOK = r"""
import hashlib, os, stat
os.chmod("shut", 0o700)
os.chmod("closed", 0o600)
left, seen = [b"."], []
while left:
    folder = left.pop()
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        found = os.lstat(path)
        kind, changed = stat.S_IFMT(found.st_mode), found.st_mtime_ns
        whole = b""
        if kind == stat.S_IFDIR:
            left.append(path)
        if kind == stat.S_IFREG:
            whole = open(path, "rb").read()
        if kind == stat.S_IFLNK:
            whole, changed = os.readlink(path), 0
        seen.append((path, found.st_mode, changed, whole))
print(len(seen), hashlib.sha256(repr(sorted(seen)).encode()).hexdigest())
"""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(tmp_path / "sandbox")
    await made.start(lambda sandbox_id, cause: None)
    yield made
    await made.stop()


async def test_a_fork_has_what_is_seldom_in_a_folder(tmp_path: Path) -> None:
    async with local_service(tmp_path) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        made = await sandbox.exec(ExecRequest(argv=("python3", "-c", MAKE)))
        assert (made.exit_code, made.stderr) == (0, b"")
        async with sandbox.fork() as fork:
            theirs = await fork.exec(ExecRequest(argv=("python3", "-c", LOOK)))
        ours = await sandbox.exec(ExecRequest(argv=("python3", "-c", LOOK)))
        assert ours.stdout.split()[0] == b"1211", ours
        assert theirs == theirs.model_copy(update={"stdout": ours.stdout})


async def test_a_snapshot_whose_maker_was_killed_leaves_nothing(backend: LocalBackend, tmp_path: Path) -> None:
    await backend.create("sb-1", SandboxSpec(limits=SandboxLimits(memory_mb=256, disk_mb=200)), "")
    channel = backend.channel("sb-1")
    write = b'{"argv": ["dd", "if=/dev/zero", "of=much", "bs=1M", "count=160"]}'
    assert b'"exit_code":0' in (await channel.request("POST", "/exec", body=write, key="k")).body
    channel.close()
    making, folder = asyncio.create_task(backend.snapshot("sb-1", "snap-1")), tmp_path / "sandbox" / "snapshots"
    while not (folder.exists() and list(folder.iterdir())):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    fork_server(tmp_path).kill()
    await asyncio.wait({making})
    assert making.exception() is not None
    assert list(folder.iterdir()), "killed before it was whole"
    await backend.forget_snapshot("snap-1")
    assert not list(folder.iterdir())


async def test_more_requests_at_once_than_wait_in_its_queue(backend: LocalBackend, tmp_path: Path) -> None:
    await backend.create("sb-1", SPEC, "")
    (init,) = fork_server(tmp_path).children()
    init.suspend()
    channel = backend.channel("sb-1")
    command = b'{"argv": ["true"]}'
    asking = [asyncio.create_task(channel.request("POST", "/exec", body=command, key=f"k{i}")) for i in range(90)]
    await asyncio.sleep(0.5)
    init.resume()
    answers = await asyncio.gather(*asking)
    assert [answer.status for answer in answers] == [200] * 90
    channel.close()


async def test_one_that_is_destroyed_before_it_has_a_cgroup(backend: LocalBackend) -> None:
    await backend.create("sb-1", SPEC, "")
    reader, writer = await backend._open("forkserver.sock")
    spec = SPEC.model_dump() | {"egress": False}
    asked = [
        {"seq": 1, "op": "snapshot", "id": "sb-1", "snapshot": "snap-1"},
        {"seq": 2, "op": "create", "id": "sb-2", "spec": spec},
        {"seq": 3, "op": "destroy", "id": "sb-2"},
    ]
    writer.write("".join(json.dumps(each) + "\n" for each in asked).encode())
    answers = [json.loads(await reader.readline())["seq"] for _ in asked]
    writer.close()
    assert sorted(answers) == [1, 2, 3]
    assert (await backend.inventory()).live == {"sb-1"}
    await backend.forget_snapshot("snap-1")


async def test_a_controller_that_was_stopped_does_not_stop_the_others(backend: LocalBackend) -> None:
    await backend.create("sb-1", SPEC, "")
    stopped = socket.socket(socket.AF_UNIX)
    stopped.connect(f"/proc/self/fd/{backend._folder_fd}/forkserver.sock")
    stopped.settimeout(0.2)
    with pytest.raises(TimeoutError):
        stopped.sendall(b'{"seq": 1, "op": "list"}\n' * 200_000)
    async with asyncio.timeout(30):
        assert (await backend.inventory()).live == {"sb-1"}
    stopped.close()


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with under(tmp_path, NO_NAMESPACES) as made:
        yield made


async def test_without_namespaces_a_deep_or_closed_folder_goes_too(bare: SandboxClient, tmp_path: Path) -> None:
    async with bare.acquire(SPEC, owner="test", key="other") as other:
        async with bare.acquire(SPEC, owner="test", key="k") as sandbox:
            await sandbox.exec(
                sh("mkdir -p shut/in; chmod 0 shut; p=d; for i in $(seq 1200); do p=$p/d; done; mkdir -p $p")
            )
        assert [path.name for path in (tmp_path / "sandbox").glob("sb-*") if path.is_dir()] == [other.id]
        assert await other.read("note.txt") == b"hello\n"


async def test_without_cgroups_little_memory_is_enough_to_read_a_file(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"limits": SandboxLimits(memory_mb=64)})
    async with under(tmp_path, NO_CGROUPS) as client, client.acquire(spec, owner="test", key="k") as sandbox:
        assert await sandbox.read("note.txt") == b"hello\n"
