"""`agentrl sandbox pause|resume|snapshot|snapshots|forget`. Registered by `sandbox`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.sandbox_client import Id, Owner, call
from agentrl.cli.sandbox_tables import span
from sandbox.client import SandboxClient


def pause(
    context: typer.Context,
    sandbox: Id,
    ttl: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds until its lease ends; by default as after a command.")
    ] = None,
) -> None:
    """Freeze everything in a sandbox. It takes no commands, and its lease goes on."""
    call(context, lambda client: client.handle(sandbox).pause(ttl_s=ttl))


def resume(context: typer.Context, sandbox: Id) -> None:
    """Let a paused sandbox go on."""
    call(context, lambda client: client.handle(sandbox).resume())


def snapshot(
    context: typer.Context,
    sandbox: Id,
    ttl: Annotated[float, typer.Option(min=0.1, help="Seconds until it is forgotten.")] = 3600.0,
) -> None:
    """Keep a sandbox's files, for others to begin from; prints the snapshot's id."""
    typer.echo(call(context, lambda client: client.handle(sandbox).snapshot(ttl_s=ttl)).id)


def snapshots(context: typer.Context, owner: Owner = None) -> None:
    """The snapshots that are kept."""
    found = call(context, lambda client: client.snapshots(owner=owner))
    table, now = Table(box=None, pad_edge=False), time.time()
    for column in ("id", "owner", "of", "age", "kept for"):
        table.add_column(column, no_wrap=True)
    for kept in sorted(found, key=lambda kept: kept.created_at):
        ages = span(now - kept.created_at), span(kept.deadline - now)
        table.add_row(escape(kept.id), escape(kept.owner), escape(kept.sandbox), *ages)
    Console().print(table if found else "no snapshots")


def forget(
    context: typer.Context,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of snapshots.", show_default=False)],
) -> None:
    """Forget snapshots. Sandboxes that began from them go on."""

    async def work(client: SandboxClient) -> None:
        for snapshot_id in ids:
            await client.forget_snapshot(snapshot_id)

    call(context, work)
