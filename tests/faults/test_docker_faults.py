"""The docker backend when containers, sandboxd, the controller or the engine are killed, and after many cycles."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from held import Held
from sandboxes import TOKEN, ControllerProcess, sandbox_config, service, sh

from agentrl.core.config import SandboxConfig
from agentrl.core.errors import SandboxError, SandboxLost
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.backends.docker.container import CONTROLLER
from sandbox.client import SandboxClient

SPEC = SandboxSpec(files={"note.txt": "hello\n"})
TRUE = ExecRequest(argv=("true",))


@pytest.fixture
def config() -> SandboxConfig:
    return sandbox_config("docker")


@pytest.fixture
def engine(config: SandboxConfig) -> Iterator[Any]:
    """The docker package's own client, to look at the engine with and to do harm."""
    docker = pytest.importorskip("docker")
    made = docker.from_env()
    yield made
    made.close()


def containers(engine: Any, folder: Path) -> list[Any]:
    """Those of the controller that works in `folder`."""
    mine = (folder / "sandbox" / "controller").read_text()
    found: list[Any] = engine.containers.list(all=True, filters={"label": f"{CONTROLLER}={mine}"}, ignore_removed=True)
    return found


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["container", "sandboxd"])
async def test_a_killed_sandbox_is_lost_with_a_cause_and_its_container_removed(
    victim: str, config: SandboxConfig, engine: Any, tmp_path: Path
) -> None:
    async with service(tmp_path, config) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        running = asyncio.create_task(sandbox.exec(sh("sleep 60", timeout_s=90)))
        await sandbox.exec(TRUE)
        (container,) = containers(engine, tmp_path)
        if victim == "container":
            container.kill()
        else:
            os.kill(engine.api.inspect_container(container.id)["State"]["Pid"], signal.SIGKILL)
        for work in (running, sandbox.exec(TRUE)):
            with pytest.raises(SandboxLost, match="killed by signal 9"):
                await work
        for _ in range(100):
            if ended := await client.list(live=False):
                break
            await asyncio.sleep(0.05)  # it is written in the background
        (view,) = ended
        assert (view.state, view.cause) == ("LOST", "sandboxd was killed by signal 9")
        await asyncio.to_thread(until, lambda: not containers(engine, tmp_path))


async def test_a_container_that_somebody_removed_is_lost(config: SandboxConfig, engine: Any, tmp_path: Path) -> None:
    async with service(tmp_path, config) as client, client.acquire(SPEC, owner="test", key="k") as sandbox:
        (container,) = containers(engine, tmp_path)
        container.remove(force=True)
        with pytest.raises(SandboxLost):
            await sandbox.exec(TRUE)
        mine = {"label": f"{CONTROLLER}={(tmp_path / 'sandbox' / 'controller').read_text()}"}
        await asyncio.to_thread(until, lambda: not engine.volumes.list(filters=mine))


async def test_killed_controller_adopts_its_containers_again(
    config: SandboxConfig, engine: Any, tmp_path: Path
) -> None:
    process = ControllerProcess(tmp_path, settings=config.model_dump(mode="json"))
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    held = Held(client, seconds=3)
    await held.start(6)
    assert await process.signal(signal.SIGKILL) == -signal.SIGKILL
    before = {container.id for container in containers(engine, tmp_path)}
    assert len(before) == 6
    await process.start()
    assert {view.id for view in await client.list()} == held.ids
    assert {container.id for container in containers(engine, tmp_path)} == before
    await held.finish()
    assert not containers(engine, tmp_path)
    await client.close()
    await process.signal(signal.SIGTERM)


class PrivateEngine:
    """A dockerd of the test's own, which it can end and start again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags = folder, flags
        self.host = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def docker(self, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["docker", "--host", self.host, *words], capture_output=True, **options)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            # In a network of its own, since `--bridge=none` removes the bridge that the machine's other engine uses.
            self._process = subprocess.Popen(
                ["unshare", "--net", "dockerd", "--host", self.host, "--data-root", f"{self.folder}/data",
                 "--exec-root", f"{self.folder}/exec", "--pidfile", f"{self.folder}/pid", "--bridge=none",
                 "--iptables=false", "--cgroup-parent", f"/{self.folder.name}", *self.flags],
                stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: self.docker("info").returncode == 0)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        pid_file = self.folder / "exec/containerd/containerd.pid"
        containerd = int(pid_file.read_text()) if pid_file.exists() else 0
        self._process.send_signal(number)
        self._process.wait()
        # Its containerd follows; a successor that meets the dying one would wait for it in vain.
        until(lambda: not psutil.pid_exists(containerd) or containerd == 0)

    def _processes(self, name: str) -> list[str]:
        """Those of that name, as the kernel cuts it, that work for this engine."""
        found = (process for process in psutil.process_iter(["name", "cmdline"]) if process.info["name"] == name)
        return [str(process) for process in found if str(self.folder) in " ".join(process.info["cmdline"] or ())]

    def left_mounts(self) -> list[str]:
        with open("/proc/self/mounts") as mounts:
            places = [line.split()[1] for line in mounts]
        return [place for place in places if place.startswith(f"{self.folder}/") and place != f"{self.folder}/data"]

    def left(self) -> dict[str, list[str]]:
        """What sandboxes may leave of themselves, all of it empty when they left nothing."""
        return {
            "containers": self.docker("ps", "--all", "--quiet", check=True).stdout.decode().split(),
            "volumes": self.docker("volume", "ls", "--quiet", check=True).stdout.decode().split(),
            "mounts": self.left_mounts(),
            "cgroups": [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{self.folder.name}/*/")],
            "shims": self._processes("containerd-shim"),
        }


@pytest.fixture(params=["live-restore", "plain"])
def private_engine(request: pytest.FixtureRequest, config: SandboxConfig) -> Iterator[PrivateEngine]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("run as root where dockerd is installed, so that the test can start and end one of its own")
    # A short path, since sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))
    engine = PrivateEngine(folder, *(["--live-restore"] if request.param == "live-restore" else []))
    engine.start()
    try:
        saved = subprocess.run(["docker", "save", config.docker.image], check=True, capture_output=True).stdout
        engine.docker("load", input=saved, check=True)
        yield engine
    finally:
        engine.end()
        # An engine with live-restore leaves its mount, for its successor; a test that failed leaves others above it.
        for mount in [*reversed(engine.left_mounts()), f"{folder}/data"]:
            subprocess.run(["umount", "--lazy", mount], stderr=subprocess.DEVNULL)
        shutil.rmtree(folder)


@pytest.fixture
def private_config(private_engine: PrivateEngine, config: SandboxConfig) -> SandboxConfig:
    return config.model_copy(update={"docker": config.docker.model_copy(update={"host": private_engine.host})})


async def test_an_engine_that_ends_is_waited_for(
    private_engine: PrivateEngine, private_config: SandboxConfig, tmp_path: Path
) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        await lives_through(number, private_engine, private_config, tmp_path / number.name)
        kept = len(private_engine.left()["volumes"])
        if private_engine.flags:
            # An engine takes the volumes of what survived it for mounted until it starts again; they hold nothing.
            assert kept == 2
            private_engine.end()
            private_engine.start()
            async with service(tmp_path / number.name, private_config):
                await asyncio.to_thread(until, lambda: not private_engine.left()["volumes"])
        assert not any(private_engine.left().values())


async def lives_through(
    number: signal.Signals, private_engine: PrivateEngine, private_config: SandboxConfig, folder: Path
) -> None:
    """A sandbox survives the engine's end or is LOST; no command ever gets another result than its own."""
    folder.mkdir()
    async with (
        service(folder, private_config) as client,
        client.acquire(SPEC, owner="test", key="k") as sandbox,
    ):
        running = asyncio.create_task(sandbox.exec(sh("sleep 6; cat note.txt", timeout_s=100)))
        await sandbox.exec(TRUE)
        await asyncio.to_thread(private_engine.end, number)
        with pytest.raises(SandboxError, match="does not answer"):
            async with client.acquire(SPEC, owner="test", key="meanwhile"):
                pass
        if private_engine.flags or number is signal.SIGKILL:
            assert (await sandbox.exec(sh("cat note.txt"))).stdout == b"hello\n", "commands need no engine"
        await asyncio.to_thread(private_engine.start)
        if private_engine.flags:
            assert (await running).stdout == b"hello\n"
        else:
            # An engine without live-restore ends its containers when it stops, or else when it starts again.
            with pytest.raises(SandboxError):
                await running
            with pytest.raises(SandboxLost, match="killed by signal 9"):
                await sandbox.exec(TRUE)
        async with client.acquire(SPEC, owner="test", key="next") as another:
            assert await another.read("note.txt") == b"hello\n"


@pytest.mark.parametrize("private_engine", ["plain"], indirect=True)
async def test_300_cycles_leak_nothing(
    private_engine: PrivateEngine, private_config: SandboxConfig, tmp_path: Path
) -> None:
    async with service(tmp_path, private_config) as client:

        async def cycles(worker: int, count: int) -> None:
            for i in range(count):
                async with client.acquire(SPEC, owner="test", key=f"{worker}-{i}") as sandbox:
                    result = await sandbox.exec(sh("sleep 71077 & (setsid sleep 71077 &); cat note.txt"))
                    assert result.stdout == b"hello\n"

        ours = psutil.Process()
        await asyncio.gather(*(cycles(100 + worker, 1) for worker in range(6)))
        files, fds, threads = sorted(os.listdir(tmp_path / "sandbox")), ours.num_fds(), ours.num_threads()
        await asyncio.gather(*(cycles(worker, 49) for worker in range(6)))
        assert not any(private_engine.left().values())
        assert not [p for p in psutil.process_iter(["cmdline"]) if "71077" in (p.info["cmdline"] or ())]
        assert sorted(os.listdir(tmp_path / "sandbox")) == files
        assert not await client.list()
        assert {view.state for view in await client.list(live=False)} == {"CLOSED"}
        # Threads of the pool come up to its bound, each with a connection.
        assert ours.num_fds() <= fds + 16
        assert ours.num_threads() <= threads + 16
