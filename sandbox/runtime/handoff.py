"""sandboxd as a container's first process: takes its listener and its configuration over one mounted unix socket, or
where nothing can be mounted, listens on the container's loopback (`alone`).

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
from sandbox.runtime.hardening import given_environment, hide_memory
from sandbox.runtime.sandboxd import Config, Daemon, listen

PATH = "/run/agentrl/handoff.sock"
TOKEN = "SANDBOXD_TOKEN"
"""The variable with the token, where there is one."""
SIZE = struct.Struct("!Q")
"""Length of the JSON that follows; the listener travels with it."""
PR_CAPBSET_DROP, PR_SET_SECUREBITS = 24, 28
NO_ROOT = 0b11
"""Secure bits: executing as root gives no capabilities, and that stays so."""
CAPABILITY_VERSION_3 = 0x20080522
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7


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
    keep_to_ourselves(ctypes.CDLL(None, use_errno=True))
    hide_memory()


def keep_to_ourselves(libc: Any) -> None:
    """Whatever capabilities we were given, programs that we start get none, as root and as any other user."""
    had = capabilities("CapPrm")
    if not had:
        return
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    _checked(libc.prctl(PR_SET_SECUREBITS, NO_ROOT, 0, 0, 0), "prctl(PR_SET_SECUREBITS)")
    kept = had & sum(1 << capability for capability in (CAP_KILL, CAP_SETGID, CAP_SETUID))
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    _checked(libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset")
    if capabilities("CapBnd"):
        raise OSError("capabilities are left that programs could gain")


def capabilities(name: str) -> int:
    """A set of our own, as bits."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith(name + ":"))


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def main() -> NoReturn:
    """Connect, set up, answer `ok` or what went wrong, serve."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(PATH)
    try:
        listener, config = receive(peer)
        env = {**given_environment(), "HOME": config["workdir"], **config["env"]}
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


def alone() -> NoReturn:
    """The configuration is in our arguments; files come by the first request."""
    config = json.loads(sys.argv[1])
    env = given_environment()
    del os.environ[TOKEN]
    token = env.pop(TOKEN)
    os.makedirs(config["workdir"], exist_ok=True)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = listen(config)
    env = {**env, "HOME": config["workdir"], **config["env"]}
    daemon = Daemon(Config(config["workdir"], config["ttl_s"], env, token=token), listener)
    protect()
    daemon.serve()
