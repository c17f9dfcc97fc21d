"""Sandbox services for tests: in this event loop, or as a process that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.core.config import DockerConfig, KubernetesConfig, SandboxConfig
from agentrl.core.http import free_port, serving
from agentrl.core.protocols import Sandbox
from agentrl.core.types import ExecRequest, SandboxSpec
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient

TOKEN = "sandbox-test-token"
REAL = ("local", "docker", "kubernetes")
"""The backends; `sandbox_config` skips what this machine has not."""
SPEC = SandboxSpec(files={"note.txt": "hello\n"}, ttl_s=60.0)
SERVE = """
import json, sys
import uvloop
from pathlib import Path
from agentrl.core.config import SandboxConfig
from agentrl.core.telemetry import setup_logging
from sandbox.api import run_sandbox
setup_logging("sandbox")
folder, port, token, settings, store = sys.argv[1:]
config = SandboxConfig(**json.loads(settings))
uvloop.run(run_sandbox(config, folder=Path(folder), port=int(port), token=token, store_url=store))
"""


def sh(script: str, *, timeout_s: float = 20.0, stdin: bytes = b"", cap_bytes: int = 1 << 20) -> ExecRequest:
    return ExecRequest(argv=("sh", "-c", script), timeout_s=timeout_s, stdin=stdin, cap_bytes=cap_bytes)


async def pids(sandbox: Sandbox, program: str) -> list[str]:
    """The last argument of every live process of a program, this question's own left out."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
    lines = (await sandbox.exec(sh(script))).stdout.decode().splitlines()
    return sorted(words[-1] for line in lines if (words := line.split()) and words[0] == program and script not in line)


DOCKER, DOCKER_PLAIN = "AGENTRL_TEST_DOCKER", "AGENTRL_TEST_DOCKER_PLAIN"
KUBECONFIG, KUBE_IMAGE = "AGENTRL_TEST_KUBECONFIG", "AGENTRL_TEST_KUBE_IMAGE"
KUBE_PLAIN = "AGENTRL_TEST_KUBE_PLAIN"


def sandbox_config(backend: str, *, bare: bool = False, **settings: Any) -> SandboxConfig:
    """For a controller on that backend, with an image without Python if it is to be `bare`. Skips the test where the
    environment has no such backend."""
    if backend == "docker":
        name = DOCKER_PLAIN if bare else DOCKER
        if name not in os.environ:
            pytest.skip(
                f"set {name} to an image with sh and {'busybox' if bare else 'python3'} of a running Docker Engine to "
                "run this test on it"
            )
        settings["docker"] = DockerConfig(image=os.environ[name], pull="never")
    if backend == "kubernetes":
        if KUBECONFIG not in os.environ:
            pytest.skip(
                f"set {KUBECONFIG} to the kubeconfig of a cluster with a namespace agentrl-sandboxes, whose pod IPs "
                f"are reachable from here, and {KUBE_IMAGE} to an image with sh and python3 to run this test on it"
            )
        if bare and KUBE_PLAIN not in os.environ:
            pytest.skip(f"set {KUBE_PLAIN} to an image with sh and busybox, as well, to run this test on it")
        settings["kubernetes"] = KubernetesConfig(
            kubeconfig=os.environ[KUBECONFIG],
            image=os.environ[KUBE_PLAIN if bare else KUBE_IMAGE],
            runtime_image=os.environ[KUBE_IMAGE] if bare else "",
            controller=f"test-{uuid.uuid4().hex[:8]}",
            request_share=0.05,
        )
    return SandboxConfig.model_validate({"backend": backend, **settings})


def local_service(
    folder: Path, *, capacity: int = 512, sweep_s: float = 0.2
) -> AbstractAsyncContextManager[SandboxClient]:
    """The controller with the local backend over real HTTP, and its client."""
    return service(folder, SandboxConfig(capacity=capacity), sweep_s=sweep_s)


@asynccontextmanager
async def service(folder: Path, config: SandboxConfig, *, sweep_s: float = 0.2) -> AsyncIterator[SandboxClient]:
    """A controller over real HTTP, and its client."""
    app = create_sandbox_app(config, folder=folder, token=TOKEN, sweep_s=sweep_s)
    async with serving(app) as url:
        client = SandboxClient(url, token=TOKEN)
        try:
            yield client
        finally:
            await client.close()


class ControllerProcess:
    """A controller that can be killed and started again on the same port and folder."""

    def __init__(
        self,
        folder: Path,
        *,
        under: tuple[str, ...] = (),
        settings: Mapping[str, Any] | None = None,
        store_url: str = "",
    ) -> None:
        self.folder, self.port = folder, free_port()
        self.store_url = store_url
        """Its store; "" means SQLite in its folder."""
        self.under = under
        """Words of a command that starts the controller, e.g. `unshare`."""
        self.settings = json.dumps(settings or {})
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "controller.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.under, sys.executable, "-c", SERVE, str(self.folder), str(self.port), TOKEN, self.settings,
                self.store_url,
                stdout=log, stderr=log,
                env={**os.environ, "AGENTRL_TEST_SECRET": "of the controller"},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def signal(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return await self._process.wait()

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()


@asynccontextmanager
async def running_controller(settings: Mapping[str, Any]) -> AsyncIterator[tuple[SandboxClient, str]]:
    """A controller as a process of its own in a fresh folder, once it serves: its client and its URL."""
    process = ControllerProcess(Path(tempfile.mkdtemp(prefix="sandbox-bench-")), settings=settings)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    try:
        await client.list()
        yield client, process.url
    finally:
        await client.close()
        await process.signal(signal.SIGTERM)


ONE_UID = ("unshare", "--user", "--map-root-user")
NO_NAMESPACES = (*ONE_UID, "sh", "-c", 'echo 0 > /proc/sys/user/max_pid_namespaces; exec "$@"', "sh")
NO_CGROUPS = ("unshare", "--mount", "sh", "-c", 'umount -R /sys/fs/cgroup; exec "$@"', "sh")
"""Words before a command that take from it what a kernel, or its administrator, may not grant."""


@asynccontextmanager
async def under(folder: Path, words: tuple[str, ...]) -> AsyncIterator[SandboxClient]:
    """A controller on local that was started with those words, and its client."""
    process = ControllerProcess(folder, under=words)
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    try:
        await client.list()
        yield client
    finally:
        await client.close()
        await process.signal(signal.SIGTERM)


def fork_server(folder: Path) -> psutil.Process:
    """The fork server that works in `folder`."""
    return next(p for p in psutil.process_iter() if is_fork_server(p) and p.cwd() == str(folder.resolve() / "sandbox"))


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "sandbox.backends.local.forkserver" in process.cmdline() and process.ppid() == 1
    except psutil.NoSuchProcess:
        return False


async def end_runtime(backend: str, folder: Path, sandbox_id: str) -> None:
    """Kill the first process of a sandbox from outside, as an operator or the kernel would."""
    if backend == "local":
        (init,) = fork_server(folder).children()
        init.kill()
        return
    import docker

    def kill() -> None:
        engine = docker.APIClient()
        try:
            # Of a pod on this machine's engine, the container has the pod's name in its own.
            found = engine.containers(filters={"name": sandbox_id})
            (container,) = (c["Id"] for c in found if not c["Names"][0].startswith("/k8s_POD_"))
            engine.kill(container)
        finally:
            engine.close()

    await asyncio.to_thread(kill)
