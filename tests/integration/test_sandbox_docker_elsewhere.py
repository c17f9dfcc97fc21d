"""The docker backend on an engine that sees nothing of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from docker_sandboxes import STATUS, run
from sandboxes import sandbox_config, service

from agentrl.core.errors import SandboxError
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.backends.docker.backend import DockerBackend
from sandbox.backends.docker.container import CONTROLLER, REPOSITORY, RUNTIME
from sandbox.backends.docker.elsewhere import KEPT
from sandbox.runtime.interpreter import SEALED


@pytest.fixture
def client() -> Iterator[Any]:
    """The docker package's own client, to look at the engine with."""
    docker = pytest.importorskip("docker")
    made = docker.from_env()
    yield made
    made.close()


async def test_an_engine_over_tcp_does_all_that_one_here_does(tmp_path: Path, client: Any) -> None:
    """Nothing of this machine is mounted there."""
    config = sandbox_config("docker", bare=True)
    async with over_tcp() as host:
        remote = config.model_copy(update={"docker": config.docker.model_copy(update={"host": host})})
        async with service(tmp_path, remote) as sandboxes:
            assert "by the exec API" in (await sandboxes.fetch("GET", "/healthz")).json()["isolation"]
            spec = SandboxSpec(files={"a": "of the spec"}, env={"COLOUR": "red"})
            async with sandboxes.acquire(spec, owner="test", key="k") as sandbox:
                data = bytes(range(256)) * 5000
                echoed = await sandbox.exec(ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data)))
                assert echoed.stdout == data
                await sandbox.write("b", data)
                assert await sandbox.read("b") == data
                timed_out = await sandbox.exec(ExecRequest(argv=("sh", "-c", "cat a; sleep 60"), timeout_s=0.5))
                assert (timed_out.status, timed_out.stdout) == ("TIMEOUT", b"of the spec")
                async with sandbox.shell() as shell:
                    await shell.run("cd /tmp; x=1")
                    assert (await shell.run("echo $PWD $x $COLOUR")).stdout == b"/tmp 1 red\n"
                said = (await sandbox.exec(ExecRequest(argv=STATUS, user="1234"))).stdout.split()
                assert said[:2] == [b"1234", b"1234"]
                assert set(said[3::2]) == {b"0" * 16}
                env = (await sandbox.exec(ExecRequest(argv=("env",)))).stdout
                assert not any(name in env for name in (b"SANDBOXD", b"LD_", b"PYTHON", b"LC_"))
                reads = (f"cat {path}" for path in ("/proc/1/environ", "/proc/1/mem", f"{RUNTIME}/{SEALED}"))
                for script in (*reads, f"rm -r {RUNTIME}/lib", f": > {RUNTIME}/x"):
                    assert (await sandbox.exec(ExecRequest(argv=("sh", "-c", script)))).exit_code != 0, script
                mounts = client.api.inspect_container(f"agentrl-{sandbox.id}")["Mounts"]
                assert {mount["Type"] for mount in mounts} == {"volume"}
            with pytest.raises(SandboxError, match="leads out"):
                async with sandboxes.acquire(SandboxSpec(files={"../a": ""}), owner="test", key="out"):
                    pass
    mine = (tmp_path / "sandbox" / "controller").read_text()
    assert not client.volumes.list(filters={"label": f"{KEPT}={mine}"})


async def test_a_controller_finds_its_own_on_an_engine_elsewhere(tmp_path: Path, client: Any) -> None:
    config = sandbox_config("docker", bare=True).docker.model_copy(update={"way_in": "exec"})
    first = DockerBackend(tmp_path, config)
    await first.start(lambda sandbox_id, cause: None)
    await first.create("sb-far", SandboxSpec(files={"a": "kept\n"}), "test")
    await first.pause("sb-far")
    await first.snapshot("sb-far", "snap-far")
    await first.resume("sb-far")
    await first.detach()
    again = DockerBackend(tmp_path, config)
    await again.start(lambda sandbox_id, cause: None)
    assert (await run(again, "sb-far", "cat", "a")).stdout == b"kept\n"
    await again.create("sb-far-fork", SandboxSpec(snapshot="snap-far"), "test")
    assert (await run(again, "sb-far-fork", "cat", "a")).stdout == b"kept\n"
    await again.destroy("sb-far")
    await again.stop()
    mine = (tmp_path / "controller").read_text()
    for label in (KEPT, CONTROLLER):
        assert not client.containers.list(all=True, filters={"label": f"{label}={mine}"}, ignore_removed=True)
        assert not client.volumes.list(filters={"label": f"{label}={mine}"})
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["controller", "runtime"]


async def test_what_the_runtimes_of_killed_controllers_left_on_an_engine_goes(tmp_path: Path, client: Any) -> None:
    config = sandbox_config("docker", bare=True).docker.model_copy(update={"way_in": "exec"})
    killed = DockerBackend(tmp_path, config)
    await killed.start(lambda sandbox_id, cause: None)
    await killed.create("sb-far", SandboxSpec(), "test")
    await killed.snapshot("sb-far", "snap-far")
    await killed.detach()
    mine = (tmp_path / "controller").read_text()
    (now,) = (volume.name for volume in client.volumes.list(filters={"label": f"{KEPT}={mine}"}))
    client.volumes.create(f"{now}-older", labels={KEPT: mine})
    client.containers.create(config.image, ["none"], labels={KEPT: mine})
    again = DockerBackend(tmp_path, config)
    await again.start(lambda sandbox_id, cause: None)
    assert [volume.name for volume in client.volumes.list(filters={"label": f"{KEPT}={mine}"})] == [now]
    assert not client.containers.list(all=True, filters={"label": f"{KEPT}={mine}"}, ignore_removed=True)
    assert (await run(again, "sb-far", "echo", "on")).stdout == b"on\n"
    by_hand = client.containers.create(f"{REPOSITORY}:snap-far", ["sh"])
    try:
        assert (await again.inventory()).live == {"sb-far"}
        await again.destroy("sb-far")
        client.volumes.get(now).remove()
        await again.create("sb-near", SandboxSpec(snapshot="snap-far"), "test")
        await again.detach()
        # Reached in another way, its sandboxes do not serve.
        socket = DockerBackend(tmp_path, config.model_copy(update={"way_in": "socket"}))
        await socket.start(lambda sandbox_id, cause: None)
        assert not client.volumes.list(filters={"label": f"{KEPT}={mine}"})
        await socket.stop()
        assert client.containers.get(by_hand.id)
    finally:
        by_hand.remove()


async def test_a_lease_on_an_engine_elsewhere_ends_without_a_controller(tmp_path: Path) -> None:
    config = sandbox_config("docker", bare=True).docker.model_copy(update={"way_in": "exec"})
    first = DockerBackend(tmp_path, config)
    await first.start(lambda sandbox_id, cause: None)
    await first.create("sb-lease", SandboxSpec(ttl_s=1.0), "test")
    await first.detach()
    await asyncio.sleep(8)
    again = DockerBackend(tmp_path, config)
    await again.start(lambda sandbox_id, cause: None)
    found = await again.inventory()
    assert (found.live, dict(found.ended)) == (frozenset(), {"sb-lease": "the lease ended without renewal"})
    await again.stop()


@asynccontextmanager
async def over_tcp() -> AsyncIterator[str]:
    """The URL of a port that leads to the machine's engine."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_unix_connection("/var/run/docker.sock")
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer), return_exceptions=True)
        for each in (writer, inner[1]):
            each.transport.abort()
        tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.wait_closed()
