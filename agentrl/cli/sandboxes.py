"""A sandbox for one command: from the configured controller, or from one that lives in this process meanwhile."""

from __future__ import annotations

import os
import secrets
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.core.config import SandboxConfig
from agentrl.core.http import serving
from agentrl.core.protocols import Sandbox
from agentrl.core.types import SandboxSpec
from agentrl.launch.endpoints import TOKEN_VARIABLE
from sandbox.api import create_sandbox_app
from sandbox.client import SandboxClient

OWNER = "agentrl-env"
LEASE_S = 3600.0
"""A person thinks for longer than an agent."""


@asynccontextmanager
async def sandbox_for(spec: SandboxSpec | None, config: SandboxConfig) -> AsyncIterator[Sandbox | None]:
    """A READY sandbox, or None for an environment without one."""
    if spec is None:
        yield None
        return
    spec = spec.model_copy(update={"ttl_s": max(spec.ttl_s, LEASE_S)})
    async with _controller(config) as (url, token):
        client = SandboxClient(url, token=token)
        try:
            async with client.acquire(spec, owner=OWNER, key=uuid.uuid4().hex) as sandbox:
                yield sandbox
        finally:
            await client.close()


@asynccontextmanager
async def _controller(config: SandboxConfig) -> AsyncIterator[tuple[str, str]]:
    if config.url:
        yield config.url, os.environ.get(TOKEN_VARIABLE, "")
        return
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="agentrl-env-") as folder:
        async with serving(create_sandbox_app(config, folder=Path(folder), token=token)) as url:
            yield url, token
