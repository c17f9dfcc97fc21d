"""Processes that are started and followed: output by offset, waits, signals, more input. Routes of `sandboxd`.

Invariants: a key starts one process, ever; of each stream the newest bytes are kept, and an answer says at which
offset its bytes begin, so that a reader knows what it missed. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sandbox.runtime.commands import Command
from sandbox.runtime.plumbing import resize
from sandbox.runtime.wire import Refused, encode

if TYPE_CHECKING:
    from sandbox.runtime.sandboxd import Daemon
    from sandbox.runtime.wire import Connection

KEPT_ENDED = 32
"""How many processes are remembered after their end; of older ones only the keys."""
MAX_KEEP, MAX_CHUNK = 64 << 20, 4 << 20
"""Most bytes kept of a stream, and most in one answer."""
MAX_WAIT_S = 60.0


class Ring:
    """One stream's newest bytes, addressed by their offset in the whole stream."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd = fd
        self.total = 0
        self.open = True
        self._keep = min(cap, MAX_KEEP)
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        self._tail += data
        # Cut off now and then only: cutting moves all that stays.
        if len(self._tail) > 2 * self._keep + 65536:
            del self._tail[: len(self._tail) - self._keep]

    def since(self, offset: int) -> tuple[int, bytes]:
        """Where the bytes begin, `offset` or later, and the bytes."""
        start = max(min(offset, self.total), self.total - min(self._keep, len(self._tail)))
        first = len(self._tail) - (self.total - start)
        return start, bytes(self._tail[first : first + MAX_CHUNK])


class Process(Command):
    """A command that nobody waits for. It holds no lease and has no deadline of its own."""

    capture: Callable[[int, int], Any] = Ring
    prefix = "process:"
    holds_lease = False

    def __init__(self, daemon: Daemon, key: str, digest: str, request: dict[str, Any]) -> None:
        keep = int(request.get("keep_bytes", 1 << 20))
        if keep < 1:
            raise ValueError("keep_bytes must be at least 1")
        super().__init__(daemon, key, digest, {**request, "cap_bytes": keep})
        self.deadline = float("inf")
        self.ended_at = 0.0
        self._verdict: tuple[str, int | None, int | None] = ("RUNNING", None, None)

    def finish(self) -> None:
        if not self.answer:
            self.ended_at = time.monotonic()
            self._verdict = self.verdict()
            self.answer = json.dumps(self.view()).encode()
            del self.daemon.running[self.pid]
            self.daemon.background.forget()

    def view(self) -> dict[str, Any]:
        word, code, number = self._verdict
        return {
            "id": self.key, "pid": self.pid, "status": word, "exit_code": code, "signal": number,
            "stdout_total": self.streams[0].total, "stderr_total": self.streams[1].total,
            "duration_s": round((self.ended_at or time.monotonic()) - self.started, 6),
        }  # fmt: skip


class Poll:
    """A request that is answered when something happened, or in the end anyhow."""

    def __init__(self, connection: Connection, deadline: float, ready: Callable[[], bool], answer: Any) -> None:
        self.deadline, self.ready, self.answer = deadline, ready, answer
        self.waiters = [connection]
        """Empty once its connection closed."""
        connection.waiting_for = self


class Background:
    """The routes under /processes."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: OrderedDict[str, Process] = OrderedDict()
        self._forgotten: dict[str, None] = {}
        self.polls: list[Poll] = []

    def route(
        self, connection: Connection, method: str, path: str, query: dict[str, str], key: str, body: bytes
    ) -> None:
        _, _, name, action = (path + "///").split("/")[:4]
        name = unquote(name)
        route = f"{method} {action}"
        if not name and route == "POST ":
            self._reply(connection, self._start(key, body))
        elif not name and route == "GET ":
            views = [process.view() for process in self._known.values()]
            connection.reply(200, json.dumps({"processes": views}).encode())
        elif route == "GET ":
            self._wait(connection, self._find(name), query)
        elif route == "GET output":
            self._output(connection, self._find(name), query)
        elif route == "POST signal":
            self._signal(connection, self._find(name), int(json.loads(body)["signal"]))
        elif route == "POST resize":
            self._resize(connection, self._find(name), json.loads(body))
        elif route == "POST stdin":
            process = self._find(name)
            if not process.give(body, last=query.get("last") == "1"):
                raise Refused(409, "CONFLICT", f"process {name!r} takes no more input", ran="no")
            self._reply(connection, process)
        else:
            raise Refused(404, "NOT_FOUND", f"sandboxd has no route {method} {path}")

    def _reply(self, connection: Connection, process: Process) -> None:
        connection.reply(200, json.dumps(process.view()).encode())

    def _find(self, key: str) -> Process:
        process = self._known.get(key)
        if process is not None:
            return process
        if key in self._forgotten:
            raise Refused(410, "SANDBOX", f"process {key!r} ran, but its end is no longer kept", "infra", "yes")
        raise Refused(404, "NOT_FOUND", f"no process with key {key!r} was started")

    def _start(self, key: str, body: bytes) -> Process:
        digest = hashlib.sha256(body).hexdigest()
        if not key:
            raise ValueError("a process needs an idempotency key")
        known = self._find(key) if key in self._known or key in self._forgotten else None
        if known is None:
            known = self._known[key] = self._daemon.launch(Process, key, digest, json.loads(body))
        elif known.digest != digest:
            raise Refused(409, "CONFLICT", f"process key {key!r} was used with another request: take a fresh key")
        return known

    def _wait(self, connection: Connection, process: Process, query: dict[str, str]) -> None:
        self._poll(connection, query, lambda: bool(process.answer), process.view)

    def _output(self, connection: Connection, process: Process, query: dict[str, str]) -> None:
        stream = process.streams[{"stdout": 0, "stderr": 1}[query.get("stream", "stdout")]]
        offset = int(query.get("offset", "0"))

        def chunk() -> dict[str, Any]:
            start, data = stream.since(offset)
            ended = bool(process.answer) and start + len(data) == stream.total
            return {"offset": start, "data": encode(data), "total": stream.total, "ended": ended}

        self._poll(connection, query, lambda: bool(process.answer) or stream.total > offset, chunk)

    def _poll(self, connection: Connection, query: dict[str, str], ready: Callable[[], bool], answer: Any) -> None:
        wait_s = min(float(query.get("wait_s", "0")), MAX_WAIT_S)
        if ready() or not wait_s > 0:
            connection.reply(200, json.dumps(answer()).encode())
        else:
            self.polls.append(Poll(connection, time.monotonic() + wait_s, ready, answer))

    def answer_polls(self, now: float) -> None:
        """Called by the loop between events: whatever happened is then seen here."""
        due = [poll for poll in self.polls if not poll.waiters or poll.ready() or poll.deadline <= now]
        for poll in due:
            self.polls.remove(poll)
        for poll in due:
            for connection in poll.waiters:
                connection.reply(200, json.dumps(poll.answer()).encode())

    def _signal(self, connection: Connection, process: Process, number: int) -> None:
        signal.Signals(number)
        if process.status is None:
            if number == signal.SIGKILL:
                self._daemon.kill_tree(process)
            else:
                os.killpg(process.pid, number)
        self._reply(connection, process)

    def _resize(self, connection: Connection, process: Process, size: dict[str, Any]) -> None:
        if not process.tty:
            raise Refused(409, "CONFLICT", f"process {process.key!r} has no terminal to resize")
        if process.streams[0].open:
            resize(process.streams[0].fd, size["rows"], size["columns"])
        self._reply(connection, process)

    def forget(self) -> None:
        """Keep of the ended ones the newest only."""
        ended = [key for key, known in self._known.items() if known.answer]
        for key in ended[: max(0, len(ended) - KEPT_ENDED)]:
            del self._known[key]
            self._forgotten[key] = None
