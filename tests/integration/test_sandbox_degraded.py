"""The local backend where the kernel grants less than root has: one uid only, or no namespaces at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandboxes import NO_CGROUPS, NO_NAMESPACES, ONE_UID, ControllerProcess, fork_server, sh, under

from agentrl.core.errors import SandboxFileError
from agentrl.core.http import Service
from agentrl.core.types import SandboxSpec
from sandbox.client import SandboxClient

SPEC = SandboxSpec(files={"note.txt": "hello\n"})


async def health(client: SandboxClient) -> dict[str, str]:
    service = Service(client._urls[0])
    try:
        answer: dict[str, str] = (await service.request("GET", "/healthz")).json()
        metrics = (await service.request("GET", "/metrics")).text
    finally:
        await service.close()
    gauge = "0.0" if answer["isolation"] == "none" else "1.0"
    assert f"agentrl_sandbox_isolated_info {gauge}" in metrics
    return answer


async def test_one_uid_is_enough_for_isolation(tmp_path: Path) -> None:
    async with under(tmp_path, ONE_UID) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        assert (await health(client))["isolation"] == "namespaces"
        result = await sandbox.exec(
            sh("cat note.txt; grep CapEff /proc/self/status; cat /proc/1/environ; kill -9 1; echo on")
        )
        assert result.stdout == b"hello\nCapEff:\t0000000000000000\non\n"
        assert b"Permission denied" in result.stderr
        assert (await sandbox.exec(sh("touch /usr/x; mount -t tmpfs none /tmp"))).exit_code != 0


async def test_no_namespaces_is_said_loudly_and_still_works(tmp_path: Path) -> None:
    async with under(tmp_path, NO_NAMESPACES) as client:
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


async def test_no_cgroups_is_said_loudly_and_still_works(tmp_path: Path) -> None:
    async with under(tmp_path, NO_CGROUPS) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        assert (await health(client))["isolation"] == "namespaces, no cgroups"
        assert "SANDBOXES HAVE NO CGROUPS" in (tmp_path / "controller.log").read_text()
        eater = sh("exec python3 -c 'b = bytearray(1 << 30)'")
        assert b"MemoryError" in (await sandbox.exec(eater)).stderr
        forks = await sandbox.exec(sh("for i in $(seq 200); do sleep 4005 & done; wait", timeout_s=1))
        assert b"fork" in forks.stderr


@pytest.mark.parametrize(("words", "option"), [(NO_NAMESPACES, "require_isolation"), (NO_CGROUPS, "require_cgroups")])
async def test_what_is_missing_can_be_refused(tmp_path: Path, words: tuple[str, ...], option: str) -> None:
    process = ControllerProcess(tmp_path, under=words, settings={option: True})
    await process.start()
    assert await process.wait() != 0
    assert f"sandbox.{option}" in (tmp_path / "controller.log").read_text()
