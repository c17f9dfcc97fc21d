"""One command in a container without Python, from its start to its verdict. Used by `plain`.

Invariants: the answer comes after all output that was written before the command's end, whoever still holds its pipes;
after a timeout it comes when the init has killed the whole tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import SandboxError
from sandbox.backends.docker.engine import Engine
from sandbox.backends.docker.hijack import Program, started
from sandbox.backends.docker.scripts import RUN
from sandbox.runtime.commands import TERM_S, Capture, result_of
from sandbox.runtime.processes import MARKER
from sandbox.runtime.wire import Refused

BEGIN_S = 60.0
"""Longest time until the engine has executed a command."""
LOOK_S = 1.0
"""How often a silent command is looked after: its supervisor may be dead, and a background child hold its pipes."""
GIVE_UP_S = 7.0
"""Seconds after the deadline when a command that does not end takes its container with it."""

LONGEST_LINE, MOST_LINES = 200, 4
"""Bytes of a line with its mark, and how many are kept: a task may read its mark where its supervisor runs."""


class Marked:
    """One stream: what the command wrote, and the lines behind marks, which are the supervisor's."""

    def __init__(self, mark: bytes, cap: int) -> None:
        self.kept = Capture(-1, cap)
        self.lines: list[list[str]] = []
        self._mark, self._rest = mark, b""

    def feed(self, data: bytes) -> None:
        self._rest += data
        while (start := self._rest.find(self._mark)) >= 0:
            end = self._rest.find(b"\n", start, start + LONGEST_LINE)
            if end < 0 and len(self._rest) - start < LONGEST_LINE:
                break
            if end < 0:
                # Not the supervisor's.
                self.kept.feed(self._rest[: start + len(self._mark)])
                self._rest = self._rest[start + len(self._mark) :]
                continue
            self.kept.feed(self._rest[:start])
            self.lines.append(self._rest[start + len(self._mark) : end].decode(errors="replace").split())
            del self.lines[:-MOST_LINES]
            self._rest = self._rest[end + 1 :]
        safe = start if start >= 0 else max(0, len(self._rest) - len(self._mark))
        self.kept.feed(self._rest[:safe])
        self._rest = self._rest[safe:]

    @property
    def ended(self) -> bool:
        return bool(self.lines) and self.lines[-1][:1] == ["E"]

    def finish(self) -> None:
        """Nothing more comes."""
        self.kept.feed(self._rest)
        self._rest = b""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to run."""

    marker: str
    argv: Sequence[str]
    env: dict[str, str]
    cwd: str
    stdin: bytes
    timeout_s: float
    cap_bytes: int
    ttl_s: float


class Running:
    def __init__(self, engine: Engine, container: str, order: Order) -> None:
        self._engine, self._container, self._order = engine, container, order
        self._nonce = secrets.token_hex(16)
        mark = self._nonce.encode()
        self._out, self._err = Marked(mark, order.cap_bytes), Marked(mark, order.cap_bytes)
        self._started = time.monotonic()
        self._begun: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """When its supervisor reported."""

    async def result(self) -> bytes:
        """An ExecResult as JSON. Refused when it could not be executed, SandboxError when that is not known."""
        order = self._order
        argv = ("sh", "-c", RUN, "agentrl", self._nonce, order.marker, str(max(1, int(order.timeout_s * 100))),
                str(int(order.ttl_s * 100)), order.cwd, *order.argv)  # fmt: skip
        given = bool(order.stdin)
        async with started(
            self._engine, self._container, argv, stdin=given, env={**order.env, MARKER: order.marker}
        ) as program:
            tasks = [asyncio.create_task(self._pump(program))]
            if given:
                tasks.append(asyncio.create_task(program.feed(order.stdin)))
            try:
                await self._follow(program, tasks[0])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (self._out, self._err):
                stream.finish()
            return self._verdict() if self._err.ended else await self._cut_off(program)

    async def _pump(self, program: Program) -> None:
        while not (self._out.ended and self._err.ended):
            piece = await program.read()
            if piece is None:
                return
            (self._err if piece[0] == 2 else self._out).feed(piece[1])
            if self._err.lines and not self._begun.done():
                self._begun.set_result(time.monotonic())

    async def _follow(self, program: Program, pump: asyncio.Task[None]) -> None:
        """Until its end is known; wakes the container's init at its deadlines."""
        while not pump.done():
            begun = self._begun.done()
            due = self._begun.result() + self._order.timeout_s + 0.01 if begun else self._started + BEGIN_S
            left = min(LOOK_S, max(0.0, due - time.monotonic()))
            watched: set[asyncio.Future[Any]] = {pump} if begun else {pump, self._begun}
            await asyncio.wait(watched, timeout=left, return_when="FIRST_COMPLETED")
            late = time.monotonic() - due
            if pump.done() or self._begun.done() != begun:
                continue
            if late > (GIVE_UP_S if begun else 0.0):
                await self._give_up()
            elif late >= 0:
                await self._poke()
                await asyncio.wait({pump}, timeout=TERM_S / 4)
            elif not (await program.state())["Running"]:
                await asyncio.wait({pump}, timeout=0.2)
                return

    async def _poke(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._engine.call("kill", self._container, "USR1")

    async def _give_up(self) -> None:
        await self._engine.call("kill", self._container)
        raise SandboxError("a command could neither be followed nor ended, so its container was killed")

    def _verdict(self) -> bytes:
        try:
            _, kind, *numbers = self._err.lines[-1]
            code, late, ooms = map(int, numbers)
        except ValueError as error:
            raise SandboxError(f"a command forged what its supervisor says: {self._err.lines[-1]}") from error
        if kind == "F":
            said = self._err.kept.bytes().decode(errors="replace").strip().rpartition("agentrl: ")[2]
            message = f"cannot execute {self._order.argv[0]!r}: {said[:500]}"
            raise Refused(400, "SANDBOX", message, blame="agent")
        signal = code - 128 if kind == "S" else None
        word = "TIMEOUT" if late else "SIGNALED" if signal else "EXITED"
        if word != "TIMEOUT" and ooms > 0 and code == 137:
            word, signal = "OOM", 9
        return self._result(word, code if word == "EXITED" else None, signal)

    async def _cut_off(self, program: Program) -> bytes:
        """Its supervisor said nothing: it was not executed, or was killed, or the container ended."""
        state = await program.state()
        if not self._err.lines and state["Pid"] == 0 and not state["Running"]:
            said = self._out.kept.bytes().decode(errors="replace").strip()
            raise Refused(400, "SANDBOX", f"cannot execute `sh` in the sandbox: {said}", blame="agent")
        inspected = await self._engine.call("inspect_container", self._container)
        code = state["ExitCode"] or 0
        if state["Running"] or not inspected["State"]["Running"] or code <= 128:
            raise SandboxError("the connection to a command broke off")
        # With a signal to its process group, or to all: what is left of it goes too.
        await self._poke()
        return self._result("SIGNALED", None, code - 128)

    def _result(self, word: str, code: int | None, signal: int | None) -> bytes:
        return result_of((word, code, signal), self._out.kept, self._err.kept, self._started)
