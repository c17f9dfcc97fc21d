"""The HTTP that sandboxd speaks: connections and refusals. Used by `sandboxd` alone.

Invariant: requests of one connection are answered in their order, and nothing here ever blocks.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import base64
import hashlib
import json
import selectors
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.runtime.background import Poll
    from sandbox.runtime.commands import Command
    from sandbox.runtime.sandboxd import Daemon
    from sandbox.runtime.shells import Turn

MAX_BODY = 256 << 20


def encode(data: bytes) -> str:
    """Base64 in the URL-safe alphabet, as pydantic writes bytes."""
    return base64.urlsafe_b64encode(data).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text.translate({45: 43, 95: 47}), validate=True) if text else b""


class Refused(Exception):
    """An answer other than success, in the error envelope of `agentrl.core.errors`."""

    def __init__(self, status: int, code: str, message: str, blame: str = "caller", ran: str = "no") -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "code": code, "blame": blame, "ran": ran}
        self.body = json.dumps({"error": dict(error, retryable=False, detail={})}).encode()


def failure(what: str, error: Exception) -> Refused:
    """What one request ran into, such as a lack of memory: the sandbox goes on."""
    return Refused(500, "SANDBOX", f"sandboxd: {what}: {type(error).__name__}: {error}", "infra", "maybe")


class Connection:
    """One HTTP/1.1 connection; its requests are answered in turn."""

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        self.daemon, self.sock = daemon, sock
        self.waiting_for: Command | Poll | Turn | None = None
        self._inbox, self._outbox = bytearray(), memoryview(b"")
        self._head: tuple[str, str, dict[str, str], int, int] | None = None
        self._busy = False
        self._pieces: Generator[bytes, None, None] | None = None
        """What is still to be sent of an answer."""
        sock.setblocking(False)
        daemon.watch(sock.fileno(), selectors.EVENT_READ, self._readable)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._inbox += data
        try:
            self._advance()
        except ValueError:
            # Not HTTP: there is nobody to answer.
            self.close()

    def _advance(self) -> None:
        while not self._busy and not self._outbox:
            if self._head is None:
                end = self._inbox.find(b"\r\n\r\n")
                if end < 0:
                    return
                first, *lines = self._inbox[:end].decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ", 2)
                pairs = (line.split(":", 1) for line in lines if ":" in line)
                headers = {name.strip().lower(): value.strip() for name, value in pairs}
                self._head = (method, target, headers, end + 4, int(headers.get("content-length", "0")))
            method, target, headers, start, length = self._head
            if length > MAX_BODY:
                self.close()
                return
            if len(self._inbox) < start + length:
                return
            body = bytes(self._inbox[start : start + length])
            del self._inbox[: start + length]
            self._head, self._busy = None, True
            self.daemon.handle(self, method, target, headers, body)

    def reply(self, status: int, body: bytes, kind: str = "application/json", extra: str = "") -> None:
        """`extra` holds whole header lines."""
        head = f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode()
        self._busy, self.waiting_for = False, None
        self._outbox = memoryview(head + body)
        self._send()

    def stream(self, pieces: Generator[bytes, None, None], kind: str, extra: str = "") -> None:
        """A success in pieces, of which few are in memory at a time. Its digest comes last, as a trailer; an `x-error`
        with status and body does where something went wrong after the beginning, which counts for nothing then."""
        first, second = next(pieces, b""), next(pieces, None)
        if second is None:
            self.reply(200, first, kind, f"x-sha256: {hashlib.sha256(first).hexdigest()}\r\n{extra}")
            return
        self._pieces, self._digest = pieces, hashlib.sha256()
        head = f"HTTP/1.1 200 -\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{extra}\r\n".encode()
        self._outbox = memoryview(head + self._chunk(first) + self._chunk(second))
        self._send()

    def _chunk(self, piece: bytes) -> bytes:
        self._digest.update(piece)
        return b"%x\r\n" % len(piece) + piece + b"\r\n"

    def _next_chunk(self, pieces: Generator[bytes, None, None]) -> bytes:
        try:
            piece = next(pieces, None)
            if piece is not None:
                return self._chunk(piece)
            last = f"x-sha256: {self._digest.hexdigest()}"
        except Exception as error:
            refusal = error if isinstance(error, Refused) else failure("an answer in pieces", error)
            last = f"x-error: {refusal.status} {refusal.body.decode()}"
        self._pieces, self._busy = None, False
        return f"0\r\n{last}\r\n\r\n".encode()

    def _send(self) -> None:
        try:
            while self._outbox:
                self._outbox = self._outbox[self.sock.send(self._outbox) :]
        except BlockingIOError:
            self.daemon.watch(self.sock.fileno(), selectors.EVENT_WRITE, self._send)
            return
        except OSError:
            self.close()
            return
        # An empty view would keep what it was a view of.
        self._outbox = memoryview(b"")
        if self._pieces is not None:
            # The loop has a turn between any two.
            self._outbox = memoryview(self._next_chunk(self._pieces))
            self.daemon.watch(self.sock.fileno(), selectors.EVENT_WRITE, self._send)
            return
        self.daemon.watch(self.sock.fileno(), selectors.EVENT_READ, self._readable)
        self._advance()

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.close()
            self._pieces = None
        if self.waiting_for is not None:
            self.waiting_for.waiters.remove(self)
            self.waiting_for = None
        if self.sock.fileno() >= 0:
            self.daemon.unwatch(self.sock.fileno())
            self.sock.close()
