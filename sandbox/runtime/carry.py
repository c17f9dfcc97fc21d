"""Carries bytes between its standard streams and sandboxd's port: `main(PORT)`, run by an exec beside it.

Started by the Kubernetes backend when it cannot reach the pod's IP, and by docker's at an engine elsewhere.
Invariant: `READY` comes first, and says that sandboxd accepted; no task may read what is carried, which holds the
token, although tasks have the same uid.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import os
import selectors
import socket

from sandbox.runtime.hardening import hide_memory

READY = b"+"


def main(port: int) -> None:
    hide_memory()
    sock = socket.socket()
    sock.settimeout(5.0)
    sock.connect(("127.0.0.1", port))
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    write_all(READY)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(0, 1 << 16) if key.fd == 0 else sock.recv(1 << 16)
                if not data:
                    return
                if key.fd == 0:
                    sock.sendall(data)
                else:
                    write_all(data)


def write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
