"""The way out of a sandbox without a network: a loopback port whose bytes go to the controller's proxy and back.

Started by sandboxd where the controller allows some egress. Invariant: nothing is decided here; each connection to the
port becomes one to the proxy's socket, and what its reader does not take yet is not read either.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.runtime.sandboxd import Daemon

PORT = 3128
CHUNK = 1 << 16
MOST = 256
"""Connections at once; more are closed at once."""


class Egress:
    """Listens, and pairs connections."""

    def __init__(self, daemon: Daemon, proxy: str) -> None:
        self._daemon, self._proxy = daemon, proxy
        self._listener = socket.socket(socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", PORT))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.pairs = 0
        daemon.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            inner, _ = self._listener.accept()
        except OSError:
            return
        try:
            outer = self._reach()
        except OSError:
            # The controller is away, or busy: the task sees a closed connection and may try again.
            inner.close()
            return
        Pair(self._daemon, self, inner, outer)

    def _reach(self) -> socket.socket:
        if self.pairs >= MOST:
            raise OSError("too many connections")
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.setblocking(False)
            outer.connect(self._proxy)
        except OSError:
            outer.close()
            raise
        return outer


class Pair:
    """Two connections, each the other's echo, until both have said all."""

    def __init__(self, daemon: Daemon, egress: Egress, inner: socket.socket, outer: socket.socket) -> None:
        self._daemon, self._egress = daemon, egress
        self._peer = {inner: outer, outer: inner}
        self._waiting = {inner: b"", outer: b""}
        """What is to be written to each."""
        self._reading = {inner, outer}
        egress.pairs += 1
        for sock in self._peer:
            sock.setblocking(False)
            self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        peer = self._peer[sock]
        events = selectors.EVENT_READ if sock in self._reading and not self._waiting[peer] else 0
        if self._waiting[sock]:
            events |= selectors.EVENT_WRITE
        if events:
            self._daemon.watch(sock.fileno(), events, lambda: self._ready(sock))
        else:
            self._daemon.unwatch(sock.fileno())

    def _ready(self, sock: socket.socket) -> None:
        peer = self._peer[sock]
        try:
            if self._waiting[sock]:
                self._write(sock)
            if sock in self._reading and not self._waiting[peer]:
                self._read(sock, peer)
        except BlockingIOError:
            pass  # Not ready after all; the loop says when it is.
        except OSError:
            self._close()
            return
        if not self._reading and not any(self._waiting.values()):
            self._close()
            return
        for each in self._peer:
            self._watch(each)

    def _write(self, sock: socket.socket) -> None:
        self._waiting[sock] = self._waiting[sock][sock.send(self._waiting[sock]) :]
        if not self._waiting[sock] and self._peer[sock] not in self._reading:
            sock.shutdown(socket.SHUT_WR)

    def _read(self, sock: socket.socket, peer: socket.socket) -> None:
        data = sock.recv(CHUNK)
        if data:
            self._waiting[peer] = data
        else:
            self._reading.discard(sock)
            peer.shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        self._egress.pairs -= 1
        for sock in self._peer:
            self._daemon.unwatch(sock.fileno())
            sock.close()
