"""Shells that keep their state from command to command. Routes of `sandboxd`.

Invariant: a command's status comes on a descriptor of its own, so no output can be taken for it; a shell that ended, or
whose command timed out, is dead, says so, and runs nothing more. Standard library only, Python 3.7+.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shlex
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sandbox.runtime.background import Process
from sandbox.runtime.commands import DRAIN_S, Capture, result_of
from sandbox.runtime.wire import Refused

if TYPE_CHECKING:
    from sandbox.runtime.sandboxd import Daemon
    from sandbox.runtime.wire import Connection

LINE = "command eval {} </dev/null 3>&-; printf '{} %d\\n' \"$?\" >&3\n"
"""What the shell is given: `command` keeps a syntax error from ending it; 3 is the status channel, closed for tasks.
The status comes with the command's number, so that nothing else that is written there counts."""
KEPT_ENDED = 8
"""How many shells that ended are remembered; of older ones only the keys."""
KEPT_TURNS = 16
"""How many results of a shell stay for replay; of older ones only the keys."""


class Valve:
    """One stream of a shell: its bytes go to the command that runs, and nowhere between commands."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd = fd
        self.total = 0
        self.open = True
        self.sink = Capture(-1, cap)

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        self.sink.feed(data)


class Turn:
    """One command in a shell."""

    def __init__(self, number: int, digest: str) -> None:
        self.number, self.digest = number, digest
        self.started = time.monotonic()
        self.answer = b""
        self.waiters: list[Connection] = []


class Shell(Process):
    """The shell's process."""

    capture = Valve
    prefix = "shell:"

    def __init__(self, daemon: Daemon, key: str, digest: str, request: dict[str, Any]) -> None:
        self._status_fd, write = os.pipe()
        self.extra_fds = (write,)
        self.turn: Turn | None = None
        self.turns: dict[str, Turn] = {}
        self.forgotten: dict[str, None] = {}
        self._said = b""
        self._numbers = 0
        try:
            super().__init__(daemon, key, digest, {"argv": ["sh"], **request, "interactive": True})
        except BaseException:
            os.close(self._status_fd)
            raise
        finally:
            os.close(write)
        os.set_blocking(self._status_fd, False)
        daemon.watch(self._status_fd, selectors.EVENT_READ, self._status_came)

    def run(self, key: str, digest: str, request: dict[str, Any]) -> Turn:
        if self.turn is not None:
            raise Refused(409, "CONFLICT", f"shell {self.key!r} still runs a command")
        if "\0" in request["command"]:
            raise ValueError("embedded null byte")
        command, cap = request["command"], int(request.get("cap_bytes", 1 << 20))
        timeout_s = float(request.get("timeout_s", 30.0))
        for stream in self.streams:
            stream.sink = Capture(-1, cap)
        self._numbers += 1
        line = LINE.format(shlex.quote(command), self._numbers)
        if self.status is not None or not self.give(line.encode(), last=False):
            raise Refused(400, "SANDBOX", f"shell {self.key!r} ended ({self.view()['status']}): open another", "agent")
        turn = self.turn = self.turns[key] = Turn(self._numbers, digest)
        self._ooms_before = self.daemon.oom_kills()
        self.deadline, self.holds_lease = turn.started + timeout_s, True
        return turn

    def _status_came(self) -> None:
        data = os.read(self._status_fd, 4096)
        if not data:
            self.daemon.unwatch(self._status_fd)
            os.close(self._status_fd)
        *lines, rest = (self._said + data).split(b"\n")
        self._said = rest[-64:]
        for line in lines:
            number, _, code = line.partition(b" ")
            if self.turn is not None and number == b"%d" % self.turn.number and code.isdigit():
                self._command_ended(int(code))

    def _command_ended(self, code: int) -> None:
        # What the command wrote is in the pipes already, since its status was written after it.
        until = time.monotonic() + DRAIN_S
        for stream in self.streams:
            while stream.open and not self._read(stream) and time.monotonic() < until:
                continue
        # A command that timed out this very moment ends with its shell.
        if not self.timed_out:
            oom = code == 137 and self.daemon.took_oom(self._ooms_before)
            self._end_turn(("OOM", None, 9) if oom else ("EXITED", code, None))

    def finish(self) -> None:
        super().finish()
        self._end_turn(self._verdict)
        self.daemon.shells.forget()

    def _end_turn(self, verdict: tuple[str, int | None, int | None]) -> None:
        turn, self.turn = self.turn, None
        if turn is None:
            return
        if self.status is None:
            self.deadline, self.holds_lease = float("inf"), False
        out, err = (stream.sink for stream in self.streams)
        turn.answer = result_of(verdict, out, err, turn.started)
        for stream in self.streams:
            stream.sink = Capture(-1, 1)
        self.daemon.extend()
        for connection in turn.waiters:
            connection.reply(200, turn.answer)
        for key in list(self.turns)[: max(0, len(self.turns) - KEPT_TURNS)]:
            del self.turns[key]
            self.forgotten[key] = None


class Shells:
    """The routes under /shells."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: dict[str, Shell] = {}
        self._forgotten: dict[str, None] = {}

    def route(self, connection: Connection, method: str, path: str, key: str, body: bytes) -> None:
        _, _, name, action = (path + "///").split("/")[:4]
        route, name = f"{method} {action}", unquote(name)
        if not key and method == "POST":
            raise ValueError("send an idempotency key")
        if not name and route == "POST ":
            shell = self._open(key, body)
            connection.reply(200, json.dumps(shell.view()).encode())
        elif name in self._forgotten:
            raise _long_ended(name)
        elif name in self._known and route == "GET ":
            connection.reply(200, json.dumps(self._known[name].view()).encode())
        elif name in self._known and route == "POST exec":
            self._daemon.answer_when_done(connection, self._run(self._known[name], key, body))
        elif name in self._known and route == "POST close":
            self._daemon.kill_tree(self._known[name])
            connection.reply(200, b"{}")
        else:
            raise Refused(404, "NOT_FOUND", f"no shell {name!r} was opened, or no route {method} {path}")

    def _open(self, key: str, body: bytes) -> Shell:
        digest = hashlib.sha256(body).hexdigest()
        known = self._known.get(key)
        if key in self._forgotten:
            raise _long_ended(key)
        if known is None:
            known = self._known[key] = self._daemon.launch(Shell, key, digest, json.loads(body))
        elif known.digest != digest:
            raise Refused(409, "CONFLICT", f"shell key {key!r} was used with another request: take a fresh key")
        return known

    def _run(self, shell: Shell, key: str, body: bytes) -> Turn:
        digest = hashlib.sha256(body).hexdigest()
        if key in shell.forgotten:
            raise Refused(410, "SANDBOX", f"exec {key!r} ran, but its result is no longer kept", "infra", "yes")
        known = shell.turns.get(key)
        if known is None:
            known = shell.run(key, digest, json.loads(body))
            self._daemon.extend()
        elif known.digest != digest:
            raise Refused(409, "CONFLICT", f"exec key {key!r} was used with another request: take a fresh key")
        return known

    def forget(self) -> None:
        """Keep of the ended ones the newest only."""
        ended = [key for key, shell in self._known.items() if shell.answer]
        for key in ended[: max(0, len(ended) - KEPT_ENDED)]:
            del self._known[key]
            self._forgotten[key] = None


def _long_ended(key: str) -> Refused:
    return Refused(410, "SANDBOX", f"shell {key!r} ended, and what ran in it is no longer kept", "infra", "maybe")
