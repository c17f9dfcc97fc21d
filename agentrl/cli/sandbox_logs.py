"""What ran in a sandbox, with its output, and what goes on there. Used by `agentrl sandbox logs` and `exec`.

Invariant: looking changes nothing; output is printed as the bytes that it is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TextIO, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from agentrl.core.errors import NotFound
from agentrl.core.types import ExecResult, ProcessView
from sandbox.client import RemoteSandbox
from sandbox.following import RemoteProcess, Stream
from sandbox.views import CommandView

Seen = TypeVar("Seen", CommandView, ProcessView)

TIMED_OUT, SIGNALED = 124, 128
"""Exit codes as shells give them."""
STREAMS: Mapping[Stream, Callable[[], TextIO]] = {"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr}
LOOK_S = 0.5
"""How often new commands and processes are looked for."""


def write_result(result: ExecResult) -> None:
    """A command's output, each stream on ours."""
    for stream, data, total in (
        (sys.stdout, result.stdout, result.stdout_total),
        (sys.stderr, result.stderr, result.stderr_total),
    ):
        write(stream, data)
        if total > len(data):
            typer.echo(f"[{total - len(data)} of {total} bytes in the middle were left out]", err=True)


def exit_code(result: ExecResult) -> int:
    """A command's end as our own exit code."""
    if result.status == "EXITED":
        return result.exit_code or 0
    typer.echo(f"[{result.status} after {result.duration_s:.1f} s, signal {result.signal}]", err=True)
    return TIMED_OUT if result.status == "TIMEOUT" else SIGNALED + (result.signal or 0)


def write(stream: TextIO, data: bytes) -> None:
    """Bytes as they are, after what was printed as text."""
    stream.flush()
    stream.buffer.write(data)
    stream.flush()


class Logs:
    """What ran in a sandbox: each command and process once, under a heading."""

    def __init__(self, sandbox: RemoteSandbox, key: str) -> None:
        self._sandbox, self._key = sandbox, key
        """Of the one that is wanted; "" for all."""
        self._seen: set[str] = set()
        self._heading = ""
        """Under which the last output was printed."""

    async def show(self, tail: int) -> None:
        """The newest `tail` commands, of which one that runs is waited for, then the processes as they are."""
        commands = self._fresh(await self._sandbox.commands())
        processes = self._fresh(await self._sandbox.processes())
        if self._key and not (commands or processes):
            raise NotFound(
                f"sandbox {self._sandbox.id} ran nothing with key {self._key!r} lately: "
                "see `agentrl sandbox show` for the keys of the newest"
            )
        for command in commands[-tail:]:
            await self._command(command)
        for process in processes:
            await self._kept(process)

    async def follow(self, tail: int) -> None:
        """As `show`, then whatever comes, as it comes, until the sandbox ends (SandboxLost)."""
        try:
            async with asyncio.TaskGroup() as group:
                commands = self._fresh(await self._sandbox.commands())[-tail:]
                while True:
                    processes = self._fresh(await self._sandbox.processes())
                    for command in commands:
                        group.create_task(self._command(command))
                    for process in processes:
                        group.create_task(self._process(process))
                    await asyncio.sleep(LOOK_S)
                    commands = self._fresh(await self._sandbox.commands())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _fresh(self, found: Sequence[Seen]) -> list[Seen]:
        """Those that are wanted and were not shown yet."""
        fresh = [one for one in found if self._key in ("", _key(one)) and _name(one) not in self._seen]
        self._seen.update(map(_name, fresh))
        return fresh

    async def _command(self, command: CommandView) -> None:
        heading = f"[bold]$[/] {escape(' '.join(command.argv))}  [dim]{escape(command.key)}[/]"
        self._under(heading)
        try:
            result = await self._sandbox.result(command.key)
        except NotFound as missing:
            self._under(heading)
            typer.echo(f"[{missing.message}]")
            return
        self._under(heading)
        write_result(result)
        code = result.exit_code if result.exit_code is not None else ""
        typer.echo(f"[{result.status} {code}, {result.duration_s:.2f} s]")

    async def _kept(self, view: ProcessView) -> None:
        self._under(_process_heading(view))
        for stream, ours in STREAMS.items():
            offset, more = 0, True
            while more:
                chunk = await self._sandbox.output(view.id, stream=stream, offset=offset)
                write(ours(), chunk.data)
                offset = chunk.offset + len(chunk.data)
                more = offset < chunk.total
        typer.echo(f"[{view.status} {view.exit_code if view.exit_code is not None else ''}]")

    async def _process(self, view: ProcessView) -> None:
        heading = _process_heading(view)
        self._under(heading)
        process = RemoteProcess(self._sandbox, view.id)
        async with aclosing(process.output()) as pieces:
            async for piece in pieces:
                self._under(heading)
                if piece.missed:
                    typer.echo(f"[{piece.missed} bytes are no longer kept]", err=True)
                write(STREAMS[piece.stream](), piece.data)
        ended = await process.wait()
        self._under(heading)
        typer.echo(f"[{ended.status} {ended.exit_code if ended.exit_code is not None else ''}]")

    def _under(self, heading: str) -> None:
        if self._heading != heading:
            Console().print(heading)
            self._heading = heading


def _process_heading(view: ProcessView) -> str:
    return f"[bold]process[/] {view.pid}  [dim]{escape(view.id)}[/]"


def _key(one: CommandView | ProcessView) -> str:
    return one.key if isinstance(one, CommandView) else one.id


def _name(one: CommandView | ProcessView) -> str:
    """Apart for commands and processes, whose keys are."""
    return f"{type(one).__name__} {_key(one)}"
