"""Files of real sandboxes: ranges, digests, folders as tar, and what does not lead out or stop the runtime."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest
from sandboxes import sh

from agentrl.core.errors import Blame, Ran, SandboxFileError
from agentrl.core.types import ExecRequest
from sandbox.client import RemoteSandbox, SandboxClient


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
