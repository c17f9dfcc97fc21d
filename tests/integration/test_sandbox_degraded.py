"""The local backend where the kernel grants less than root has: one uid only, or no namespaces at all."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandboxes import TOKEN, ControllerProcess, fork_server, sh

from agentrl.core.errors import SandboxFileError
from agentrl.core.http import Service
from agentrl.core.types import SandboxSpec
from sandbox.client import SandboxClient

ONE_UID = ("unshare", "--user", "--map-root-user")
NO_NAMESPACES = (*ONE_UID, "sh", "-c", 'echo 0 > /proc/sys/user/max_pid_namespaces; exec "$@"', "sh")
SPEC = SandboxSpec(files={"note.txt": "hello\n"})


@asynccontextmanager
async def controller(folder: Path, under: tuple[str, ...]) -> AsyncIterator[SandboxClient]:
    process = ControllerProcess(folder, under=under)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    try:
        yield client
    finally:
        await client.close()
        await process.signal(signal.SIGTERM)


async def health(client: SandboxClient) -> dict[str, str]:
    service = Service(client._urls[0])
    try:
        answer: dict[str, str] = (await service.request("GET", "/healthz")).json()
        metrics = (await service.request("GET", "/metrics")).text
    finally:
        await service.close()
    gauge = "1.0" if answer["isolation"] == "namespaces" else "0.0"
    assert f"agentrl_sandbox_isolated_info {gauge}" in metrics
    return answer


async def test_one_uid_is_enough_for_isolation(tmp_path: Path) -> None:
    async with controller(tmp_path, ONE_UID) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        assert (await health(client))["isolation"] == "namespaces"
        result = await sandbox.exec(
            sh("cat note.txt; grep CapEff /proc/self/status; cat /proc/1/environ; kill -9 1; echo on")
        )
        assert result.stdout == b"hello\nCapEff:\t0000000000000000\non\n"
        assert b"Permission denied" in result.stderr
        assert (await sandbox.exec(sh("touch /usr/x; mount -t tmpfs none /tmp"))).exit_code != 0


async def test_no_namespaces_is_said_loudly_and_still_works(tmp_path: Path) -> None:
    async with controller(tmp_path, NO_NAMESPACES) as client:
        async with client.acquire(SPEC, owner="test", key="k") as sandbox:
            assert (await health(client))["isolation"] == "none"
            assert "SANDBOXES ARE NOT ISOLATED" in (tmp_path / "controller.log").read_text()
            assert (await sandbox.exec(sh("cat note.txt"))).stdout == b"hello\n"
            assert await sandbox.read("/work/note.txt") == b"hello\n"
            await sandbox.write("/tmp/there", b"x")
            for path in ("/etc/passwd", str(tmp_path / "sandbox.db")):
                with pytest.raises(SandboxFileError):
                    await sandbox.read(path)
            stuck = await sandbox.exec(sh("setsid sleep 4001 & (setsid sleep 4002 &); sleep 4003", timeout_s=0.3))
            assert stuck.status == "TIMEOUT"
            (init,) = fork_server(tmp_path).children()
            assert init.children() == []
            await sandbox.exec(sh("(setsid sleep 4004 &)"))
            (orphan,) = init.children()
        assert not orphan.is_running()
        assert not list((tmp_path / "sandbox").glob("sb-*"))


async def test_no_namespaces_can_be_refused(tmp_path: Path) -> None:
    process = ControllerProcess(tmp_path, under=NO_NAMESPACES, settings={"require_isolation": True})
    await process.start()
    assert await process.wait() != 0
    assert "sandbox.require_isolation" in (tmp_path / "controller.log").read_text()
