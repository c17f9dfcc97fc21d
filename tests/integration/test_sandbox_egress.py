"""Sandboxes without a network reach what `sandbox.egress` lists, through the proxy, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import NO_NAMESPACES, TOKEN, ControllerProcess, sandbox_config, service

from agentrl.core.errors import ConfigError
from agentrl.core.telemetry import Metrics
from agentrl.core.types import ExecRequest, ExecResult, ProcessRequest, SandboxSpec
from sandbox.backends.docker.backend import DockerBackend
from sandbox.client import RemoteSandbox, SandboxClient
from sandbox.egress import EgressProxy
from sandbox.metrics import SPECS

DATA = os.urandom(1 << 20) * 4
GET = """
import hashlib, socket, sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(hashlib.sha256(urllib.request.urlopen(url, timeout=20).read()).hexdigest())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
"""
RAW = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)
    print("connected")
except OSError:
    print("refused")
"""

HOLD = """
import select, socket, time
held = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(20)]
until = time.time() + 3
while time.time() < until:
    closed = select.select(held, [], [], 0)[0]
    time.sleep(0.05)
print(20 - len(closed), "of 20", flush=True)
time.sleep(60)
"""


@pytest.fixture
async def server() -> AsyncIterator[int]:
    """The port of an HTTP server on this machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(DATA) + DATA)
        await writer.drain()
        writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield made.sockets[0].getsockname()[1]
    made.close()
    await made.wait_closed()


async def python(sandbox: RemoteSandbox, script: str, *args: str) -> ExecResult:
    return await sandbox.exec(ExecRequest(argv=("python3", "-c", script, *args), timeout_s=30))


@pytest.mark.parametrize("backend", ["local", "docker"])
async def test_listed_places_are_reached_and_no_others(backend: str, server: int, tmp_path: Path) -> None:
    config = sandbox_config(backend, egress=(f"127.0.0.1:{server}",))
    async with service(tmp_path, config) as client, client.acquire(SandboxSpec(), owner="test", key="k") as sandbox:
        # The address would be the sandbox's own otherwise.
        env = {"NO_PROXY": "", "no_proxy": ""}
        request = ExecRequest(
            argv=("python3", "-c", GET, *(f"http://127.0.0.1:{port}/x" for port in (server, 9))), env=env, timeout_s=30
        )
        whole, refused = (await sandbox.exec(request)).stdout.decode().splitlines()
        assert whole == hashlib.sha256(DATA).hexdigest()
        assert refused.startswith("403 agentrl: 127.0.0.1:9 is not in sandbox.egress")
        assert (await python(sandbox, RAW, str(server))).stdout == b"refused\n"
        metrics = (await client.fetch("GET", "/metrics")).text
        assert "agentrl_sandbox_egress_total 1" in metrics
        assert "agentrl_sandbox_egress_refused_total 1" in metrics


@pytest.mark.parametrize("backend", ["local", "docker"])
async def test_an_adopted_sandbox_still_gets_out(backend: str, server: int, tmp_path: Path) -> None:
    settings = sandbox_config(backend, egress=(f"127.0.0.1:{server}",)).model_dump(mode="json")
    process = ControllerProcess(tmp_path, settings=settings)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    async with client.acquire(SandboxSpec(env={"NO_PROXY": "", "no_proxy": ""}), owner="test", key="k") as sandbox:
        await process.signal(signal.SIGKILL)
        await process.start()
        got = await python(sandbox, GET, f"http://127.0.0.1:{server}/x")
        assert got.stdout.decode().strip() == hashlib.sha256(DATA).hexdigest()
    await client.close()
    await process.signal(signal.SIGTERM)


@pytest.mark.parametrize("backend", ["local", "docker"])
async def test_one_sandbox_cannot_take_all_connections(
    backend: str, server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.egress.MOST", 8)
    config, spec = (
        sandbox_config(backend, egress=(f"127.0.0.1:{server}",)),
        SandboxSpec(env={"NO_PROXY": "", "no_proxy": ""}),
    )
    async with (
        service(tmp_path, config) as client,
        client.acquire(spec, owner="test", key="greedy") as greedy,
        client.acquire(spec, owner="test", key="other") as other,
        greedy.running(ProcessRequest(argv=("python3", "-c", HOLD))) as holding,
    ):
        assert (await anext(holding.output())).data == b"4 of 20\n"
        got = await python(other, GET, f"http://127.0.0.1:{server}/x")
        assert got.stdout.decode().strip() == hashlib.sha256(DATA).hexdigest()


async def test_without_namespaces_it_is_refused(tmp_path: Path) -> None:
    process = ControllerProcess(tmp_path, under=NO_NAMESPACES, settings={"egress": ["example.org:443"]})
    await process.start()
    assert await process.wait() != 0
    assert "sandbox.egress needs namespaces" in (tmp_path / "controller.log").read_text()


async def test_where_it_cannot_work_it_is_refused(tmp_path: Path) -> None:
    config = sandbox_config("docker", egress=("example.org:443",))
    for update in ({"network": "bridge"}, {"way_in": "exec"}):
        docker = config.docker.model_copy(update=update)
        backend = DockerBackend(tmp_path, docker, egress=EgressProxy(config.egress, Metrics(SPECS)))
        with pytest.raises(ConfigError, match=r"sandbox\.egress needs"):
            await backend.start(lambda sandbox_id, cause: None)
