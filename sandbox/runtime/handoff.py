"""sandboxd as a container's first process: takes its listener and its configuration over one mounted unix socket.

Started by the docker backend. The listener comes as a file descriptor, so nothing inside the container is writable for
the controller's sake, and the task finds no socket of ours to reach, to replace or to lead elsewhere.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from sandbox.runtime.egress import Egress
from sandbox.runtime.sandboxd import Config, Daemon

PATH = "/run/agentrl/handoff.sock"
SIZE = struct.Struct("!Q")
"""Length of the JSON that follows; the listener travels with it."""
PR_SET_DUMPABLE = 4


def receive(peer: socket.socket) -> tuple[socket.socket, Any]:
    """The listener and the configuration. EOFError when the controller left."""
    fds = array.array("i", [-1])
    head, ancillary, _, _ = peer.recvmsg(SIZE.size, socket.CMSG_SPACE(fds.itemsize))
    if len(head) < SIZE.size or not ancillary:
        raise EOFError("the controller handed over no listener")
    fds = array.array("i")
    fds.frombytes(ancillary[0][2][: fds.itemsize])
    with peer.makefile("rb") as stream:
        (size,) = SIZE.unpack(head)
        data = stream.read(size)
    if len(data) < size:
        raise EOFError("the controller left in the middle of the configuration")
    os.set_inheritable(fds[0], False)
    return socket.socket(fileno=fds[0]), json.loads(data)


def protect() -> None:
    """No task may trace us or read our memory. An init is also deaf to signals from inside that it left at default."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def main() -> NoReturn:
    """Connect, set up, answer `ok` or what went wrong, serve."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(PATH)
    try:
        listener, config = receive(peer)
        env = dict(os.environ, HOME=config["workdir"], **config["env"])
        os.makedirs(config["workdir"], exist_ok=True)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        daemon = Daemon(Config(config["workdir"], config["ttl_s"], env), listener)
        protect()
        if config.get("egress"):
            Egress(daemon, config["egress"])
        daemon.files.write_all(config["files"])
    except Exception as error:
        peer.sendall(f"{type(error).__name__}: {error}".encode()[:4000])
        sys.exit(70)
    peer.sendall(b"ok")
    peer.close()
    daemon.serve()
