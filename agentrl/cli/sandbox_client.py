"""Which controller `agentrl sandbox` talks to, and how. Used by every module of that command.

Invariant: a client is closed however its call ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from agentrl.core.errors import ConfigError
from sandbox.client import SandboxClient

T = TypeVar("T")
URL_VARIABLE = "AGENTRL_SANDBOX_URL"
Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a sandbox, see `ls`.", show_default=False)]
Owner = Annotated[str | None, typer.Option(help="Only those of this run or tenant.")]


def call(context: typer.Context, work: Callable[[SandboxClient], Awaitable[T]], *, patience_s: float = 1.0) -> T:
    """What `work` returns. A controller that is away is waited for, for `patience_s`."""
    url, token = context.obj
    if not url:
        raise ConfigError(f"which controller? Give --run NAME, or --url URL (or {URL_VARIABLE}) and --token")

    async def called() -> T:
        client = SandboxClient(url, token=token, patience_s=patience_s)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(called())
