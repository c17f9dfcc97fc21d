"""Containers at the engine: made, listed and removed. Used by `backend`.

Invariant: only those with our controller's label are listed, and a removed one is known to the engine no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentrl.core.errors import ConfigError, SandboxError
from sandbox.backends.docker.container import CONTROLLER, SANDBOX
from sandbox.backends.docker.engine import Engine, is_absent, is_busy

REMOVAL_S = 30.0


class Containers:
    def __init__(self, engine: Engine, controller: str) -> None:
        self._engine, self._controller = engine, controller

    async def create(self, sandbox_id: str, body: Mapping[str, Any], pull: Callable[[str], Awaitable[None]]) -> str:
        """Its id; `pull` gets an image that is not there."""
        name = f"agentrl-{sandbox_id}"
        try:
            made = await self._engine.call("create_container_from_config", body, name)
        except SandboxError as error:
            if "storage-opt" in error.message:
                raise ConfigError(f"sandbox.docker.disk = 'quota': {error.message}") from error
            if not is_absent(error):
                raise
            await pull(body["Image"])
            made = await self._engine.call("create_container_from_config", body, name)
        return str(made["Id"])

    async def list(self, sandbox_id: str = "") -> dict[str, Any]:
        """Ours by sandbox id, in whatever state."""
        labels = [f"{CONTROLLER}={self._controller}", f"{SANDBOX}={sandbox_id}" if sandbox_id else SANDBOX]
        found = await self._engine.call("containers", all=True, filters={"label": labels})
        return {container["Labels"][SANDBOX]: container for container in found if container["Labels"][SANDBOX]}

    async def remove(self, container: str) -> bool:
        """Returns when the engine does not know it any more: False when it was gone already."""
        deadline = time.monotonic() + REMOVAL_S
        while True:
            try:
                await self._engine.call("remove_container", container, force=True, v=True)
                return True
            except SandboxError as error:
                if is_absent(error):
                    return False
                # Busy: another removal of it is in progress.
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
