"""`agentrl sandbox`: look at the sandboxes of a controller, work in them, end them. Typed by operators.

Invariant: looking changes nothing, not even a lease; `exec`, `shell` and `cp` do to a sandbox what an agent could.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from agentrl.cli.arguments import find_run
from agentrl.cli.sandbox_client import URL_VARIABLE, Id, Owner, call
from agentrl.cli.sandbox_copy import get_file, get_folder, put_file, put_folder
from agentrl.cli.sandbox_keep import forget, pause, resume, snapshot, snapshots
from agentrl.cli.sandbox_logs import Logs, exit_code, write_result
from agentrl.cli.sandbox_shell import SHELL, run_shell
from agentrl.cli.sandbox_tables import describe, event_line, owners_table, sandbox_table
from agentrl.core.errors import ConfigError, SandboxLost
from agentrl.core.types import ExecRequest
from agentrl.launch.endpoints import TOKEN_VARIABLE, Endpoints
from sandbox.client import SandboxClient

SHELL_PATIENCE_S = 20.0
"""How long a shell waits for a controller that restarts."""
FOLLOW_S = 20.0
"""How long one look at the events waits."""

app = typer.Typer()
for verb in (pause, resume, snapshot, snapshots, forget):
    app.command()(verb)


@app.callback()
def connect(
    context: typer.Context,
    url: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Base URL of the controller.")] = "",
    token: Annotated[str, typer.Option(envvar=TOKEN_VARIABLE, help="Its bearer token.")] = "",
    run: Annotated[str, typer.Option(help="Name or folder of a run: its controller and token.")] = "",
) -> None:
    """Look after sandboxes. Say which controller: --run NAME, or --url and --token (or their variables)."""
    if run:
        path = find_run(run).endpoints
        if not path.exists():
            raise ConfigError(f"run {run} has no {path}: it never started")
        endpoints = Endpoints.read(path)
        url, token = endpoints.url("sandbox"), endpoints.token
    context.obj = (url, token)


@app.command()
def ls(
    context: typer.Context,
    owner: Owner = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended in the last hour.")] = False,
) -> None:
    """The sandboxes, with their states, ages and leases."""
    views = call(context, lambda client: client.list(owner=owner, live=not ended))
    Console().print(sandbox_table(views, time.time()) if views else "no sandboxes")


@app.command()
def show(context: typer.Context, sandbox: Id) -> None:
    """Everything about one sandbox: state, cause, lease, limits, newest commands."""

    async def work(client: SandboxClient) -> None:
        view = await client.view(sandbox)
        describe(Console(), view, await client.handle(sandbox).commands(), time.time())

    call(context, work)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    context: typer.Context,
    sandbox: Id,
    argv: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Words of the command.", show_default=False)],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until it is killed.")] = 60.0,
    cwd: Annotated[str, typer.Option(help="Where it runs; the sandbox's workdir by default.")] = "",
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="More environment.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
) -> None:
    """Run one command in a sandbox; its output and its exit code become ours."""
    request = ExecRequest(
        argv=tuple(argv), timeout_s=timeout, cwd=cwd, env=_pairs(env or ()),
        stdin=sys.stdin.buffer.read() if stdin else b"",
    )  # fmt: skip
    result = call(context, lambda client: client.handle(sandbox).exec(request))
    write_result(result)
    raise typer.Exit(exit_code(result))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--env {word}: write NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def shell(
    context: typer.Context,
    sandbox: Id,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Instead of a shell.", show_default=False)
    ] = None,
) -> None:
    """A shell on this terminal, or one that reads its commands from a pipe. Its exit code becomes ours."""
    words = tuple(argv or SHELL)
    raise typer.Exit(call(context, lambda client: run_shell(client, sandbox, words), patience_s=SHELL_PATIENCE_S))


@app.command()
def logs(
    context: typer.Context,
    sandbox: Id,
    key: Annotated[str, typer.Option(help="Only the command or process with this idempotency key.")] = "",
    tail: Annotated[int, typer.Option(min=1, help="How many of the newest commands.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
) -> None:
    """The newest commands and processes of a live sandbox, with their output. A command that runs is waited for."""

    async def work(client: SandboxClient) -> None:
        shown = Logs(client.handle(sandbox), key)
        try:
            await (shown.follow(tail) if follow else shown.show(tail))
        except SandboxLost as ended:
            if not follow:
                raise
            typer.echo(f"[{ended.message}]")

    try:
        call(context, work)
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def cp(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="FROM", help="A path here, or ID:PATH.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TO", help="A path here, or ID:PATH.", show_default=False)],
) -> None:
    """Copy a file into a sandbox or out of it, or the content of a folder (a source that ends in /)."""
    inside = [word for word in (source, target) if ":" in word]
    if len(inside) != 1:
        raise ConfigError(f"copy between a path here and ID:PATH in a sandbox, not {source} to {target}")
    sandbox, path = inside[0].split(":", 1)
    into = target == inside[0]
    if source.endswith("/"):
        copy = put_folder(Path(source), path) if into else get_folder(path, Path(target))
    else:
        copy = put_file(Path(source), path) if into else get_file(path, Path(target))
    typer.echo(f"{call(context, lambda client: copy(client.handle(sandbox)))} bytes: {source} -> {target}")


@app.command()
def rm(
    context: typer.Context,
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", show_default=False)] = None,
    owner: Annotated[str, typer.Option(help="Also every live one of this run or tenant.")] = "",
) -> None:
    """Close sandboxes, whatever they are doing. Their episodes fail as `infra` and are tried again."""
    if not sandboxes and not owner:
        raise ConfigError("name the sandboxes to close, or --owner RUN for all of a run")

    async def work(client: SandboxClient) -> None:
        owned = [view.id for view in await client.list(owner=owner)] if owner else []
        for sandbox_id in dict.fromkeys([*(sandboxes or ()), *owned]):
            await client.handle(sandbox_id).close()
            view = await client.view(sandbox_id)
            typer.echo(f"{sandbox_id} {view.state} {view.cause}".rstrip())

    call(context, work)


@app.command()
def gc(context: typer.Context) -> None:
    """Sweep now: close what expired, declare lost what is gone, destroy what no store knows."""
    swept = call(context, lambda client: client.sweep())
    typer.echo(f"{swept.expired} expired, {swept.lost} lost, {swept.orphans} orphans")


@app.command()
def events(
    context: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="Only events numbered above this.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until Ctrl-C.")] = False,
    owner: Owner = None,
    sandbox: Annotated[str, typer.Option(help="Only those of this sandbox.")] = "",
) -> None:
    """Changes of state, oldest first, of the last hour."""

    async def work(client: SandboxClient) -> None:
        cursor, console = after, Console()
        while True:
            page = await client.events(cursor, wait_s=FOLLOW_S if follow else 0.0)
            for event in page.events:
                if owner in (None, event.owner) and sandbox in ("", event.sandbox):
                    console.print(event_line(event))
            cursor = page.cursor
            if not page.events and not follow:
                return

    try:
        call(context, work)
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Sandboxes by owner, and the oldest ones, again and again until Ctrl-C."""

    async def work(client: SandboxClient) -> None:
        if once:
            Console().print(owners_table(await client.list(), time.time()))
            return
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(owners_table(await client.list(), time.time()), refresh=True)
                await asyncio.sleep(every)

    try:
        call(context, work)
    except KeyboardInterrupt:
        raise typer.Exit from None
