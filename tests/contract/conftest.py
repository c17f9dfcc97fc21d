"""Sandboxes on every backend that this machine has, and in memory. Each test gets a controller of its own.

Containers and pods are of an image without Python, as most that people bring.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import REAL, SPEC, sandbox_config, service

from agentrl.core.protocols import Sandboxes
from agentrl.testing.sandbox import InMemorySandboxes
from sandbox.backends.docker.container import RUNTIME
from sandbox.backends.kubernetes.manifests import BROUGHT
from sandbox.client import RemoteSandbox, SandboxClient
from sandbox.runtime.interpreter import command

CAPACITY = 4


@pytest.fixture(params=REAL)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend."""
    return str(request.param)


@pytest.fixture
def python(backend: str) -> tuple[str, ...]:
    """The words that run a script: where the image has no Python, sandboxd's own can be read."""
    if backend == "local":
        return ("python3", "-c")
    return tuple(command(RUNTIME if backend == "docker" else BROUGHT, "")[:-1])


@pytest.fixture
async def client(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SandboxClient]:
    """A controller on that backend, with room for 4, over HTTP."""
    config = sandbox_config(backend, bare=True, capacity=CAPACITY)
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "of the controller")
    async with service(tmp_path, config) as made:
        yield made


@pytest.fixture
async def sandbox(client: SandboxClient) -> AsyncIterator[RemoteSandbox]:
    """One sandbox there."""
    async with client.acquire(SPEC, owner="test", key="one") as made:
        yield made


@pytest.fixture(params=["memory", *REAL])
async def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandboxes]:
    """The double, or a controller on a backend, with room for 4."""
    if request.param == "memory":
        yield InMemorySandboxes(capacity=CAPACITY, create_s=0.01)
    else:
        async with service(tmp_path, sandbox_config(request.param, bare=True, capacity=CAPACITY)) as made:
            yield made
