"""The fork server's folder seen from outside: who holds it, its sockets, and the controllers that are connected.

Used by `forkserver`. Invariant: one fork server a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.backends.local.forkserver import ForkServer

SOCKET, LOCK = "forkserver.sock", "forkserver.lock"
LOCK_S = 10.0
SEND_S = 3.0
"""How long a controller may take to read what it is told."""


class Peer:
    """A connected controller: JSON lines both ways."""

    def __init__(self, server: ForkServer, sock: socket.socket) -> None:
        self.server, self.sock = server, sock
        self._inbox = bytearray()
        sock.settimeout(SEND_S)
        server.watch(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.server.disconnected(self)
            return
        self._inbox += data
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest
        for line in lines:
            self.server.handle(self, json.loads(line))

    def send(self, message: Mapping[str, Any]) -> None:
        # Waiting is right here, but not for long: messages are short, and a controller that does not read is dead, or
        # was stopped, and must not stop us for the others.
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.server.disconnected(self)


def bind(path: str) -> socket.socket:
    """Listen on a relative path: the folder's own may be longer than a socket address can be."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def hold() -> None:
    """Hold the folder that we are in for our lifetime, or leave it to one that serves there already.

    One that was killed may hold it for a moment still, and one that has just begun does not serve yet.
    """
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(SOCKET)
                os._exit(0)
            if time.monotonic() > until:
                raise
        time.sleep(0.02)
