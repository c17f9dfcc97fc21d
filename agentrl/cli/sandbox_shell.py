"""A shell in a sandbox, on the person's terminal or at the end of a pipe. Used by `agentrl sandbox shell`.

Invariant: however it ends, the terminal is as it was before.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, nullcontext

import typer

from agentrl.cli.sandbox_logs import SIGNALED, STREAMS, write
from agentrl.core.errors import Conflict, ServiceUnavailable
from agentrl.core.types import ProcessRequest, ProcessView, SandboxView, TerminalSize
from sandbox.client import SandboxClient
from sandbox.following import RemoteProcess

SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi")
PIECE = 1 << 16
"""Most bytes of input in one request."""


def terminal_size(fd: int) -> TerminalSize:
    """Of a terminal that may not know its size."""
    size = os.get_terminal_size(fd)
    return TerminalSize(rows=size.lines or 24, columns=size.columns or 80)


@contextmanager
def raw(fd: int) -> Iterator[None]:
    """Every key goes to us as it is, until the end of the block."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Input:
    """Standard input, read by a thread, since a pipe, a file and a terminal have no other way in common."""

    def __init__(self, fd: int) -> None:
        self._fd, self._loop = fd, asyncio.get_running_loop()
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._came = asyncio.Event()
        threading.Thread(target=self._read, daemon=True, name="stdin").start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._fd, PIECE)
            except OSError:
                # A terminal that was hung up.
                piece = b""
            self._pieces.put(piece)
            try:
                self._loop.call_soon_threadsafe(self._came.set)
            except RuntimeError:
                # The loop has ended meanwhile, and nobody wants it any more.
                return
            if not piece:
                return

    async def piece(self) -> bytes:
        """What came next; b"" at the end."""
        while self._pieces.empty():
            self._came.clear()
            await self._came.wait()
        return self._pieces.get()


class Session:
    """One shell that runs."""

    def __init__(self, client: SandboxClient, view: SandboxView, process: RemoteProcess, fd: int) -> None:
        self._client, self._view, self._process, self._fd = client, view, process, fd
        self._sandbox = client.handle(view.id)

    async def run(self, *, terminal: bool) -> ProcessView:
        """To the shell's end."""
        showing = asyncio.create_task(self._show())
        work = [self._give(), self._renew(), *([self._follow_size()] if terminal else [])]
        tasks = {showing, *map(asyncio.create_task, work)}
        try:
            while not showing.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks -= done
            return await self._process.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _show(self) -> None:
        async with aclosing(self._process.output()) as pieces:
            async for piece in pieces:
                write(STREAMS[piece.stream](), piece.data)

    async def _give(self) -> None:
        keys = Input(self._fd)
        piece = b"."
        while piece:
            piece = await keys.piece()
            try:
                await self._process.send(piece, last=not piece)
            except ServiceUnavailable:
                # Whether it arrived is not known, and twice is worse than not at all.
                typer.echo(f"[{len(piece)} bytes of input may be lost]\r", err=True)
            except Conflict:
                # It ended, which its output will say.
                return

    async def _renew(self) -> None:
        """Keep the lease from ending, and never shorten one."""
        ttl_s = self._view.spec.ttl_s
        while True:
            if self._view.deadline - time.time() < ttl_s:
                await self._sandbox.renew(ttl_s)
            await asyncio.sleep(ttl_s / 3)
            self._view = await self._client.view(self._view.id)

    async def _follow_size(self) -> None:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, changed.set)
        try:
            while True:
                await changed.wait()
                changed.clear()
                await self._sandbox.resize(self._process.id, terminal_size(self._fd))
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


async def run_shell(client: SandboxClient, sandbox_id: str, argv: tuple[str, ...]) -> int:
    """A shell with our standard input and output; its exit code. A hang-up or a TERM ends it, and is our end."""
    view = await client.view(sandbox_id)
    fd = sys.stdin.fileno()
    terminal = os.isatty(fd) and sys.stdout.isatty()
    request = ProcessRequest(argv=argv, interactive=True)
    if terminal:
        env = {"TERM": os.environ.get("TERM", "dumb")}
        request = request.model_copy(update={"tty": terminal_size(fd), "env": env})
    loop, ours = asyncio.get_running_loop(), asyncio.current_task()
    assert ours is not None
    came: list[int] = []

    def leave(number: int) -> None:
        came.append(number)
        ours.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, leave, number)
    try:
        with raw(fd) if terminal else nullcontext():
            async with client.handle(sandbox_id).running(request) as process:
                ended = await Session(client, view, process, fd).run(terminal=terminal)
    except asyncio.CancelledError:
        if not came:
            raise
        return SIGNALED + came[0]
    if ended.status == "EXITED":
        return ended.exit_code or 0
    typer.echo(f"[{ended.status}, signal {ended.signal}]", err=True)
    return SIGNALED + (ended.signal or 0)
