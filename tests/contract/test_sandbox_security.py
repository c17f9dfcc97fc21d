"""What a task inside a sandbox cannot reach: the network, the host, the controller, another sandbox."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sandboxes import TOKEN, sh

from agentrl.core.config import SandboxConfig
from agentrl.core.errors import SandboxFileError, Unauthorized
from agentrl.core.http import Service, serving
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient

REPLACE = """
import os
for folder, folders, files in os.walk("/"):
    if folder == "/":
        folders.remove("proc")
    for name in {"sandboxd.py", "sandboxd.pyc", "ld.so"} & set(files):
        path = os.path.join(folder, name)
        print("found", name)
        for attempt, args in ((open, (path, "a")), (os.unlink, (path,)), (os.rename, (folder, folder + ".old"))):
            try:
                attempt(*args)
                print("changed", path)
            except OSError:
                pass
"""


async def test_no_network(client: SandboxClient, python: tuple[str, ...]) -> None:
    host = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = host.sockets[0].getsockname()[1]
    script = (
        "import socket\n"
        f"for where in (('127.0.0.1', {port}), ('8.8.8.8', 53)):\n"
        "    try: s = socket.socket(); s.settimeout(1); s.connect(where); print('connected')\n"
        "    except OSError as e: print('refused')\n"
    )
    async with client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        result = await sandbox.exec(ExecRequest(argv=(*python, script)))
        assert result.stdout == b"refused\nrefused\n"
    host.close()
    await host.wait_closed()


async def test_no_environment_of_the_controller(client: SandboxClient) -> None:
    async with client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        result = await sandbox.exec(sh("env; cat /proc/*/environ"))
        assert b"AGENTRL_TEST_SECRET" not in result.stdout
        assert os.environ["AGENTRL_TEST_SECRET"].encode() not in result.stdout


async def test_other_sandboxes_and_the_host_are_invisible(client: SandboxClient, tmp_path: Path) -> None:
    async with (
        client.acquire(SandboxSpec(files={"secret": "of a"}), owner="test", key="a") as a,
        client.acquire(SandboxSpec(), owner="test", key="b") as b,
    ):
        await a.exec(sh("sleep 1234 & echo > /tmp/of-a"))
        seen = await b.exec(sh(f"ls -A /work /tmp {tmp_path} /home /root; ls -d /proc/[0-9]*; cat /proc/*/cmdline"))
        assert b"of-a" not in seen.stdout
        assert b"1234" not in seen.stdout
        assert b"secret" not in seen.stdout
        assert b"sandbox.db" not in seen.stdout
        with pytest.raises(SandboxFileError):
            await b.read("secret")
        with pytest.raises(SandboxFileError):
            await b.read(str(tmp_path / "sandbox.db"))


async def test_the_root_is_read_only_and_no_privilege_is_left(client: SandboxClient) -> None:
    async with client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        for attempt in ("touch /usr/x", "touch /etc/x", "mount -t tmpfs none /tmp", "mknod /tmp/d b 8 0", "chroot /"):
            assert (await sandbox.exec(sh(attempt))).exit_code != 0, attempt
        status = (await sandbox.exec(sh("grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status"))).stdout.split()
        assert status[1::2] == [b"0" * 16, b"0" * 16, b"0" * 16, b"1"]


async def test_the_runtime_cannot_be_traced_or_read(client: SandboxClient) -> None:
    async with client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/0", "/proc/1/root/etc/passwd"):
            assert (await sandbox.exec(sh(f"cat {path}"))).exit_code != 0, path


async def test_the_runtime_cannot_be_replaced_or_stopped(client: SandboxClient, python: tuple[str, ...]) -> None:
    async with client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        replaced = await sandbox.exec(ExecRequest(argv=(*python, REPLACE)))
        assert replaced.exit_code == 0, replaced.stderr
        assert {line.split()[0] for line in replaced.stdout.splitlines()} == {b"found"}
        for name in ("STOP", "TERM", "HUP", "KILL", "SEGV"):
            await sandbox.exec(sh(f"kill -{name} 1"))
        assert (await sandbox.exec(sh("echo serves"))).stdout == b"serves\n"


async def test_wrong_token_is_401(tmp_path: Path) -> None:
    app = create_sandbox_app(SandboxConfig(), folder=tmp_path, token=TOKEN)
    async with serving(app) as url:
        for token in ("", "wrong", TOKEN + "x"):
            service = Service(url, token=token)
            with pytest.raises(Unauthorized):
                await service.request("GET", "/v1/sandboxes")
            with pytest.raises(Unauthorized):
                await service.request("DELETE", "/v1/sandboxes/any")
            health = (await service.request("GET", "/healthz")).json()
            assert health["isolation"] == "namespaces"
            await service.close()
