"""Commands inside a sandbox: output capture, timeouts, and what becomes of a command's processes. Used by `sandboxd`.

Invariant: a command has an answer as soon as its leader ended, whoever still holds its pipes; when it timed
out, none of its processes is left, also not those that left its session or were orphaned.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sandbox.runtime.plumbing import END_OF_INPUT, pipes, terminal
from sandbox.runtime.wire import decode, encode

if TYPE_CHECKING:
    from sandbox.runtime.sandboxd import Daemon
    from sandbox.runtime.wire import Connection

TERM_S = 2.0
"""Seconds between TERM to the group and KILL to the whole tree."""
DRAIN_S = 0.05
"""Seconds that output may trickle after the leader's exit while somebody else holds the pipe."""


class Capture:
    """One stream's bytes: the first and the last half of the cap, and a count of all."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd = fd
        self.total = 0
        self.open = True
        self._half = (cap + 1) // 2
        self._cap = cap
        self._head, self._tail = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        keep = self._cap - self._half
        if len(self._tail) > 2 * keep + 65536:
            del self._tail[: len(self._tail) - keep]

    def bytes(self) -> bytes:
        keep = self._cap - self._half
        return bytes(self._head) + (bytes(self._tail[-keep:]) if keep else b"")


def result_of(verdict: tuple[str, int | None, int | None], out: Capture, err: Capture, started: float) -> bytes:
    """An ExecResult as JSON."""
    word, code, number = verdict
    result = {
        "status": word, "exit_code": code, "signal": number,
        "stdout": encode(out.bytes()), "stderr": encode(err.bytes()),
        "stdout_total": out.total, "stderr_total": err.total,
        "duration_s": round(time.monotonic() - started, 6),
    }  # fmt: skip
    return json.dumps(result, separators=(",", ":")).encode()


class Command:
    """One command from spawn to its stored result: running -> [terminating -> killed] -> draining -> done."""

    capture: Callable[[int, int], Any] = Capture
    """Makes what takes a stream's bytes, from its descriptor and a cap."""
    prefix = ""
    """Keeps the markers of commands, processes and shells apart."""
    holds_lease = True
    extra_fds: tuple[int, ...] = ()
    """What the command gets as descriptors 3 and up."""

    def __init__(self, daemon: Daemon, key: str, digest: str, request: dict[str, Any]) -> None:
        self.daemon, self.key, self.digest = daemon, key, digest
        self.marker = self.prefix + key
        self.started = time.monotonic()
        self.started_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.deadline = self.started + float(request.get("timeout_s", 30.0))
        self.timed_out = False
        self._ooms_before = daemon.oom_kills()
        self.status: int | None = None
        self.answer = b""
        self.waiters: list[Connection] = []
        self._stdin = memoryview(decode(request.get("stdin", "")))
        cap, tty = int(request.get("cap_bytes", 1 << 20)), request.get("tty")
        self._more_stdin = bool(request.get("interactive") or tty)
        ends = terminal(tty) if tty else pipes(stdin=bool(self._stdin or self._more_stdin))
        try:
            self.pid = daemon.spawn(request, self.marker, (*ends.theirs, *self.extra_fds), ends.tty)
        except BaseException:
            ends.close_ours()
            raise
        finally:
            ends.close_theirs()
        self.tty = bool(tty)
        self.streams = [type(self).capture(fd, cap) for fd in (ends.stdout, ends.stderr)]
        for stream in self.streams:
            stream.open = stream.fd >= 0
            if stream.open:
                daemon.watch(stream.fd, selectors.EVENT_READ, functools.partial(self._read, stream))
        self._stdin_fd = ends.stdin
        if self._stdin:
            daemon.watch(self._stdin_fd, selectors.EVENT_WRITE, self._write)

    def give(self, data: bytes, *, last: bool) -> bool:
        """More input, for a command that is interactive. False when it takes none any more."""
        if self._stdin_fd < 0 or not self._more_stdin:
            return False
        self._stdin = memoryview(bytes(self._stdin) + data + (END_OF_INPUT if last and self.tty else b""))
        self._more_stdin = not last
        if self._stdin:
            self.daemon.watch(self._stdin_fd, selectors.EVENT_WRITE, self._write)
        elif last:
            self._end_stdin()
        return True

    def _write(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._stdin_fd, self._stdin[: 1 << 18]) :]
        except BlockingIOError:
            return
        except OSError:
            self._stdin, self._more_stdin = memoryview(b""), False
        if self._stdin:
            return
        # An empty view would keep what it was a view of.
        self._stdin = memoryview(b"")
        if self._more_stdin:
            self.daemon.unwatch(self._stdin_fd)
        else:
            self._end_stdin()

    def _end_stdin(self) -> None:
        self._stdin = memoryview(b"")
        if self._stdin_fd >= 0:
            self.daemon.unwatch(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = -1

    def _read(self, stream: Capture, limit: int = 16) -> bool:
        """Take what is there, `limit` chunks at most. True when the pipe holds nothing more now."""
        for _ in range(limit):
            try:
                data = os.read(stream.fd, 65536)
            except BlockingIOError:
                return True
            except OSError:
                # How a terminal says that nobody has it open any more.
                data = b""
            if not data:
                self.daemon.unwatch(stream.fd)
                os.close(stream.fd)
                stream.open = False
                if self.status is not None and not any(s.open for s in self.streams):
                    self.finish()
                return True
            # After the answer a background child may still hold the pipe: its output is read and dropped,
            # since closing our end would kill it.
            if not self.answer:
                stream.feed(data)
        return False

    def exited(self, status: int) -> None:
        self.status = status
        self._end_stdin()
        if self.timed_out:
            self.daemon.kill_tree(self)
        self.deadline = time.monotonic() + DRAIN_S
        for stream in self.streams:
            while stream.open and not self._read(stream):
                if time.monotonic() > self.deadline:
                    break
        if not any(stream.open for stream in self.streams):
            self.finish()

    def expire(self) -> None:
        """The deadline of the current phase has passed."""
        if self.status is not None:
            self.finish()
        elif not self.timed_out:
            self.timed_out = True
            self.deadline = time.monotonic() + TERM_S
            try:
                os.killpg(self.pid, signal.SIGTERM)
            except ProcessLookupError:
                self.deadline = 0.0
        else:
            self.daemon.kill_tree(self)
            self.deadline = time.monotonic() + 0.5

    def verdict(self) -> tuple[str, int | None, int | None]:
        """How it ended, once it did: the status word, the exit code of one that exited, the signal of another."""
        status = self.status or 0
        signaled, code = os.WIFSIGNALED(status), os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        word = "TIMEOUT" if self.timed_out else "SIGNALED" if signaled else "EXITED"
        if not self.timed_out and (code == 137 or (signaled and os.WTERMSIG(status) == signal.SIGKILL)):
            word = "OOM" if self.daemon.took_oom(self._ooms_before) else word
        number = os.WTERMSIG(status) if signaled else int(signal.SIGKILL) if word == "OOM" else None
        return word, code if word == "EXITED" else None, number

    def finish(self) -> None:
        if self.answer:
            return
        out, err = self.streams
        self.answer = result_of(self.verdict(), out, err, self.started)
        self.daemon.finished(self)
