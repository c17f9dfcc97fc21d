"""`agentrl sandbox`: look at the sandboxes of a controller, work in them, end them. Typed by operators.

Invariant: looking changes nothing, not even a lease; `exec`, `shell` and `cp` do to a sandbox what an agent could.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from agentrl.cli.arguments import find_run
from agentrl.cli.sandbox_copy import get_file, get_folder, put_file, put_folder
from agentrl.cli.sandbox_shell import Shell
from agentrl.cli.sandbox_tables import describe, event_line, owners_table, sandbox_table
from agentrl.core.errors import ConfigError, NotFound
from agentrl.core.types import ExecRequest, ExecResult
from agentrl.launch.endpoints import TOKEN_VARIABLE, Endpoints
from sandbox.client import RemoteSandbox, SandboxClient

URL_VARIABLE = "AGENTRL_SANDBOX_URL"
TIMED_OUT, SIGNALED = 124, 128
"""Exit codes as shells give them."""
FOLLOW_S = 20.0
"""How long one look at the events waits."""

app = typer.Typer()
T = TypeVar("T")
Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a sandbox, see `ls`.", show_default=False)]
Owner = Annotated[str | None, typer.Option(help="Only those of this run or tenant.")]


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


def _client(context: typer.Context) -> SandboxClient:
    url, token = context.obj
    if not url:
        raise ConfigError(f"which controller? Give --run NAME, or --url URL (or {URL_VARIABLE}) and --token")
    return SandboxClient(url, token=token, patience_s=1.0)


def _call(context: typer.Context, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
    async def call() -> T:
        client = _client(context)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(call())


@app.command()
def ls(
    context: typer.Context,
    owner: Owner = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended in the last hour.")] = False,
) -> None:
    """The sandboxes, with their states, ages and leases."""
    views = _call(context, lambda client: client.list(owner=owner, live=not ended))
    Console().print(sandbox_table(views, time.time()) if views else "no sandboxes")


@app.command()
def show(context: typer.Context, sandbox: Id) -> None:
    """Everything about one sandbox: state, cause, lease, limits, newest commands."""

    async def work(client: SandboxClient) -> None:
        view = await client.view(sandbox)
        describe(Console(), view, await client.handle(sandbox).commands(), time.time())

    _call(context, work)


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
    result = _call(context, lambda client: client.handle(sandbox).exec(request))
    _write_out(result)
    raise typer.Exit(_exit_code(result))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--env {word}: write NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _write_out(result: ExecResult) -> None:
    for stream, data, total in (
        (sys.stdout, result.stdout, result.stdout_total),
        (sys.stderr, result.stderr, result.stderr_total),
    ):
        stream.buffer.write(data)
        stream.flush()
        if total > len(data):
            typer.echo(f"[{total - len(data)} of {total} bytes in the middle were left out]", err=True)


def _exit_code(result: ExecResult) -> int:
    if result.status == "EXITED":
        return result.exit_code or 0
    typer.echo(f"[{result.status} after {result.duration_s:.1f} s, signal {result.signal}]", err=True)
    return TIMED_OUT if result.status == "TIMEOUT" else SIGNALED + (result.signal or 0)


@app.command()
def shell(
    context: typer.Context,
    sandbox: Id,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until one line is killed.")] = 3600.0,
) -> None:
    """Work in a sandbox line by line; folder and exported variables are kept between lines. Ctrl-D ends it."""
    with asyncio.Runner() as runner:
        client = _client(context)
        try:
            opened = Shell(runner.run(client.get(sandbox)), timeout_s=timeout)
            for line in opened.lines():
                if (result := opened.run(runner, line)) is not None:
                    _write_out(result)
                    opened.status = _exit_code(result)
        finally:
            runner.run(client.close())
    raise typer.Exit(opened.status)


@app.command()
def logs(
    context: typer.Context,
    sandbox: Id,
    key: Annotated[str, typer.Option(help="Only the command with this idempotency key.")] = "",
    tail: Annotated[int, typer.Option(min=1, help="How many of the newest commands.")] = 10,
) -> None:
    """The newest commands of a live sandbox with their output. One that still runs is waited for."""

    async def work(client: SandboxClient) -> None:
        handle = client.handle(sandbox)
        known = [command for command in await handle.commands() if key in ("", command.key)]
        if key and not known:
            known_keys = "see `agentrl sandbox show` for the keys of the newest"
            raise NotFound(f"sandbox {sandbox} ran no command with key {key!r} lately: {known_keys}")
        for command in known[-tail:]:
            Console().print(f"[bold]$[/] {escape(' '.join(command.argv))}  [dim]{escape(command.key)}[/]")
            await _show_result(handle, command.key)

    _call(context, work)


async def _show_result(handle: RemoteSandbox, key: str) -> None:
    try:
        result = await handle.result(key)
    except NotFound as missing:
        typer.echo(f"[{missing.message}]")
        return
    _write_out(result)
    typer.echo(
        f"[{result.status} {result.exit_code if result.exit_code is not None else ''}, {result.duration_s:.2f} s]"
    )


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
    typer.echo(f"{_call(context, lambda client: copy(client.handle(sandbox)))} bytes: {source} -> {target}")


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

    _call(context, work)


@app.command()
def gc(context: typer.Context) -> None:
    """Sweep now: close what expired, declare lost what is gone, destroy what no store knows."""
    swept = _call(context, lambda client: client.sweep())
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
        _call(context, work)
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
        _call(context, work)
    except KeyboardInterrupt:
        raise typer.Exit from None
