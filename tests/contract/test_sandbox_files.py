"""Files of real sandboxes: ranges, digests, folders as tar, and what does not lead out or stop the runtime."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest
from sandboxes import sh

from agentrl.core.errors import Blame, Ran, SandboxFileError
from agentrl.core.types import ExecRequest, SandboxLimits, SandboxSpec
from sandbox.client import RemoteSandbox, SandboxClient

ODD = r"""
import os
os.mkdir("odd")
os.chdir("odd")
for name in (b"\xff\xfe", b"new\nline", b"a" * 255, b"\xc3\xa9" * 120, b"-rf", b" sp ", b"back\\slash", b"..x"):
    with open(name, "wb") as file:
        file.write(name)
    os.link(name, name[:200] + b".hard")
    os.symlink(name, name[:200] + b".soft")
    os.mkdir(name[:200] + b".folder")
os.symlink("/nowhere/" + "x" * 900, "dangling")
os.mkfifo("pipe")
open("empty", "w").close()
with open("sparse", "wb") as file:
    file.truncate(3 << 20)
os.utime("empty", (-5, -5))
os.utime("sparse", (1 << 34, 1 << 34))
os.makedirs("d/e/e/p")
"""
"""Makes a folder of what is seldom in one."""
LOOK = r"""
import hashlib, os, stat, sys
os.chdir(sys.argv[1])
left, seen = [b"."], []
while left:
    folder = left.pop()
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind == stat.S_IFDIR:
            left.append(path)
        if kind != stat.S_IFIFO:
            whole = b""
            if kind == stat.S_IFREG:
                whole = open(path, "rb").read()
            if kind == stat.S_IFLNK:
                whole = os.readlink(path)
            seen.append((path, kind, whole))
print(len(seen), hashlib.sha256(repr(sorted(seen)).encode()).hexdigest())
"""
"""Prints what a folder holds."""


def archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, *, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, 0o755
    return info


async def test_ranges(sandbox: RemoteSandbox) -> None:
    await sandbox.write("data", b"0123456789")
    assert await sandbox.read_range("data", 3, 4) == b"3456"
    assert await sandbox.read_range("data", 8, 100) == b"89"
    assert await sandbox.read_range("data", 10, 1) == b""


async def test_folders_go_up_and_down(sandbox: RemoteSandbox) -> None:
    await sandbox.upload_tar("up", archive(member("bin/tool"), content=b"#!/bin/sh\necho hi"))
    assert (await sandbox.exec(ExecRequest(argv=("up/bin/tool",)))).stdout == b"hi\n"
    await sandbox.exec(sh("ln -s /etc/passwd up/link; mkfifo up/pipe"))
    with tarfile.open(fileobj=io.BytesIO(await sandbox.download_tar("up"))) as tar:
        assert sorted(tar.getnames()) == [".", "./bin", "./bin/tool", "./link"]
        assert tar.getmember("./link").issym()
    for path in ("../etc", "/nowhere"):
        with pytest.raises(SandboxFileError):
            await sandbox.download_tar(path)


@pytest.mark.parametrize(
    "members",
    [
        (member("../escape"),),
        (member("/tmp/escape"),),
        (member("deep/../../escape"),),
        (member("out", tarfile.SYMTYPE, target="/tmp"), member("out/escape")),
        (member("out", tarfile.SYMTYPE, target=".."), member("out/escape")),
        (member("hard", tarfile.LNKTYPE, target="/etc/passwd"),),
        (member("device", tarfile.CHRTYPE),),
    ],
    ids=lambda members: " ".join(info.name for info in members),
)
async def test_an_archive_that_leads_out_of_its_folder_is_refused(
    sandbox: RemoteSandbox, members: tuple[tarfile.TarInfo, ...]
) -> None:
    with pytest.raises(SandboxFileError) as refused:
        await sandbox.upload_tar("up", archive(*members, content=b"x"))
    assert (refused.value.blame, refused.value.ran) == (Blame.AGENT, Ran.NO)
    found = await sandbox.exec(sh("ls escape /tmp/escape /escape"))
    assert (found.exit_code != 0, found.stdout) == (True, b"")


async def test_a_folder_and_a_file_larger_than_the_memory_that_is_left(client: SandboxClient) -> None:
    spec = SandboxSpec(limits=SandboxLimits(memory_mb=64, disk_mb=160), ttl_s=120.0)
    async with client.acquire(spec, owner="test", key="small") as small:
        made = await small.exec(sh("mkdir up; head -c 100000000 /dev/urandom >up/a; echo b >up/b; sha256sum <up/a"))
        assert made.exit_code == 0, made
        with tarfile.open(fileobj=io.BytesIO(await small.download_tar("up"))) as tar:
            content = tar.extractfile("./a")
            assert content is not None
            assert hashlib.file_digest(content, "sha256").hexdigest() == made.stdout.decode().split()[0]
            assert tar.getnames() == [".", "./a", "./b"]
        data = await small.read("up/a")
        assert hashlib.sha256(data).hexdigest() == made.stdout.decode().split()[0]


async def test_odd_folders_go_down_and_up(sandbox: RemoteSandbox, python: tuple[str, ...]) -> None:
    made = await sandbox.exec(ExecRequest(argv=(*python, ODD)))
    assert made.exit_code == 0, made
    await sandbox.upload_tar("again", await sandbox.download_tar("odd"))
    one, two = [await sandbox.exec(ExecRequest(argv=(*python, LOOK, name))) for name in ("odd", "again")]
    assert one.stdout.split()[0] == b"39", one
    assert one.stdout == two.stdout


async def test_a_folder_is_deeper_than_python_recurses(sandbox: RemoteSandbox) -> None:
    await sandbox.exec(sh("p=d; for i in $(seq 1200); do p=$p/d; done; mkdir -p $p"))
    with tarfile.open(fileobj=io.BytesIO(await sandbox.download_tar("d"))) as tar:
        assert len(tar.getnames()) == 1201
    assert (await sandbox.exec(sh("echo on"))).stdout == b"on\n"


async def test_what_cannot_be_read_is_named(sandbox: RemoteSandbox) -> None:
    await sandbox.exec(sh("mkdir up; head -c 600000 /dev/zero >up/a; mkfifo up/b; echo x >up/c; chmod 0 up/c"))
    if (await sandbox.exec(sh("cat up/c"))).exit_code == 0:
        # As root with its capabilities one may read everything.
        assert len(await sandbox.download_tar("up")) > 600_000
        return
    with pytest.raises(SandboxFileError, match=r"\./c: Permission denied"):
        await sandbox.download_tar("up")


async def test_symlinks_do_not_lead_relative_paths_out(sandbox: RemoteSandbox) -> None:
    await sandbox.exec(sh("ln -s /etc/hostname link; ln -s /tmp dir; ln -s ok inside; echo fine > ok"))
    for path in ("link", "dir/x", "dir/../dir/x"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")
    assert await sandbox.read("inside") == b"fine\n"


async def test_a_fifo_or_device_does_not_stop_the_runtime(sandbox: RemoteSandbox) -> None:
    await sandbox.exec(sh("mkfifo pipe"))
    for path in ("pipe", "/dev/zero", "/work"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, b"x")


async def test_bytes_that_do_not_match_their_digest_are_refused(client: SandboxClient, sandbox: RemoteSandbox) -> None:
    params = {"path": "note.txt", "sha256": hashlib.sha256(b"other").hexdigest()}
    for kind in ("files", "tar"):
        with pytest.raises(SandboxFileError, match="digest") as refused:
            await client.send("PUT", f"/v1/sandboxes/{sandbox.id}/{kind}", params=params, content=b"these")
        assert refused.value.ran is Ran.NO
    assert await sandbox.read("note.txt") == b"hello\n"
