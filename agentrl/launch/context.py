"""What the code of a role is started with, and how it is found. Used by `child` and by `agentrl serve`."""

from __future__ import annotations

import importlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from agentrl.core.config import RunConfig
from agentrl.launch.endpoints import Endpoints
from agentrl.launch.layout import RunFolder


@dataclass(frozen=True, slots=True)
class RoleContext:
    """One role of one run."""

    role: str
    folder: RunFolder
    config: RunConfig
    endpoints: Endpoints
    argument: str = ""
    """What a role needs to be told beyond the config."""

    @property
    def host(self) -> str:
        return urlsplit(self.endpoints.url(self.role)).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        return self.endpoints.port(self.role)


def role_main(context: RoleContext) -> Coroutine[Any, Any, None]:
    """The role's coroutine; each role is a module of its own, so that only the roles that need torch import it."""
    module = importlib.import_module(f"agentrl.launch.roles.{context.role.split('-')[0]}")
    coroutine: Coroutine[Any, Any, None] = module.run(context)
    return coroutine
