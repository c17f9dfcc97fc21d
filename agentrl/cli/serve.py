"""`agentrl serve`: one service alone, for a run whose other parts are elsewhere."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from agentrl.cli.arguments import Words, read_config
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.telemetry import setup_logging
from agentrl.launch.context import RoleContext, role_main
from agentrl.launch.endpoints import TOKEN_VARIABLE, Endpoints, choose_endpoints
from agentrl.launch.layout import RunFolder


class Name(StrEnum):
    GATEWAY = "gateway"
    SANDBOX = "sandbox"
    REWARD = "reward"
    ENGINE = "engine"


def command(
    service: Annotated[Name, typer.Argument(help="Which service.", show_default=False)],
    words: Words = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    token: Annotated[str, typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token; made up when not given.")] = "",
    state: Annotated[Path, typer.Option("--dir", help="Folder for the service's state.")] = Path("serve"),
) -> None:
    """Run one service by a config: the gateway over `engine.urls`, the sandbox controller, the reward service over
    `sandbox.url`, or the embedded engine with `model.path`."""
    config = read_config(words)
    role = "engine-0" if service is Name.ENGINE else service.value
    folder = RunFolder(state)
    if folder.status.exists():
        raise ConfigError(f"{state} holds a run, whose config a service would overwrite: choose another --dir")
    folder.create(config)
    if service in (Name.GATEWAY, Name.ENGINE):
        _use_model(folder, config)
    context = RoleContext(role, folder, config, _endpoints(role, config, host, port, token))
    setup_logging(role, config.telemetry.log_level)
    said = "token as given" if token else f"token {context.endpoints.token}"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{service.value} on {context.endpoints.url(role)} ({said}), state in {state}")
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(role_main(context))


def _use_model(folder: RunFolder, config: RunConfig) -> None:
    if not config.model.path:
        raise ConfigError("set model.path to a model folder (`agentrl model init` makes a tiny one)")
    folder.warm.unlink(missing_ok=True)
    folder.adopt_model(Path(config.model.path))


def _endpoints(role: str, config: RunConfig, host: str, port: int, token: str) -> Endpoints:
    """The config's addresses of the others, and this service's own."""
    chosen = choose_endpoints(config)
    own = f"http://{host}:{port or chosen.port(role)}"
    return Endpoints(token=token or secrets.token_urlsafe(24), urls={**chosen.urls, role: own})
