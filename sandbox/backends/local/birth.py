"""How a fork becomes a sandbox: its limits, its walls, its files, then sandboxd. Used by `forkserver`.

Invariant: what a task could reach runs only after every limit and wall is up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sandbox.backends.local import isolation, layers
from sandbox.backends.local import kernel as k
from sandbox.backends.local.cgroups import Cgroups
from sandbox.runtime.egress import Egress
from sandbox.runtime.sandboxd import Config, Daemon

EGRESS, PROXY = "egress", "proxy.sock"
"""The folder with the way out, and its socket there."""
PARENT_ENDED = 71
"""Exit code of a sandbox whose fork server was killed."""


@dataclass(frozen=True)
class Ground:
    """What sandboxes are made on."""

    folder: str
    why_not: str
    """Why there are no namespaces; empty when there are."""
    many_uids: bool
    cgroups: Cgroups | None

    def snapshot(self, snapshot_id: str) -> str:
        return f"{self.folder}/snapshots/{os.path.basename(snapshot_id)}.tar"


def become(
    ground: Ground, name: str, spec: Mapping[str, Any], uid: int, listener: socket.socket, status: int
) -> NoReturn:
    """In the fork: set up, report, serve. Never returns into the fork server's loop."""
    parent = os.getppid()
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        keep_only(listener.fileno(), status)
        # Short-lived, and a collection would touch, and so copy, every page shared with the fork server.
        gc.set_threshold(20_000)
        if ground.why_not:
            daemon = _bare(ground, name, spec, listener, parent)
        else:
            daemon = _isolated(ground, name, spec, uid, listener)
        daemon.files.write_all(spec["files"])
        os.write(status, b"ok")
        os.close(status)
        daemon.serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(status, f"{type(error).__name__}: {error}"[:4000].encode())
        os._exit(70)


def keep_only(*fds: int) -> None:
    """Close every descriptor but the standard ones and these."""
    first = 3
    for fd in sorted(fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def _isolated(ground: Ground, name: str, spec: Mapping[str, Any], uid: int, listener: socket.socket) -> Daemon:
    owner, limits = uid if ground.many_uids else 0, spec["limits"]
    counter, memory_mb = _limit(ground, name, limits)
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(open(ground.snapshot(spec["snapshot"]), "rb")) if spec["snapshot"] else None
        egress = f"{ground.folder}/{EGRESS}" if spec["egress"] else ""
        isolation.enter(f"{ground.folder}/root", f"{ground.folder}/mnt", name, owner, spec, egress=egress)
        if archive is not None:
            layers.unpack("/", archive, owner)
    env = _environment(spec, spec["workdir"])
    daemon = Daemon(Config(spec["workdir"], spec["ttl_s"], env, oom_counter=counter), listener)
    isolation.limit_resources(memory_mb, limits["pids"] if owner else None)
    isolation.drop_privileges(owner)
    if egress:
        Egress(daemon, f"{isolation.EGRESS}/{PROXY}")
    return daemon


def _bare(ground: Ground, name: str, spec: Mapping[str, Any], listener: socket.socket, parent: int) -> Daemon:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    home, scratch = f"{ground.folder}/{name}/work", f"{ground.folder}/{name}/tmp"
    os.makedirs(home)
    os.makedirs(scratch)
    if spec["snapshot"]:
        with open(ground.snapshot(spec["snapshot"]), "rb") as archive:
            layers.unpack(f"{ground.folder}/{name}", archive, -1)
    env = {**_environment(spec, home), "TMPDIR": scratch}
    counter, memory_mb = _limit(ground, name, spec["limits"])
    isolation.limit_resources(memory_mb, None)
    config = Config(spec["workdir"], spec["ttl_s"], env, home=home, scratch=scratch, oom_counter=counter)
    daemon = Daemon(config, listener)
    # No namespace ends us with the fork server: the kernel tells us instead, and we end what is below us.
    signal.signal(signal.SIGTERM, lambda *_: daemon.exit(PARENT_ENDED))
    k.prctl(k.PR_SET_PDEATHSIG, signal.SIGTERM, "SET_PDEATHSIG")
    if os.getppid() != parent:
        daemon.exit(PARENT_ENDED)
    return daemon


def _limit(ground: Ground, name: str, limits: Mapping[str, Any]) -> tuple[int, int | None]:
    """Put ourselves under the sandbox's limits: its OOM counter, and the memory that is left to rlimits."""
    return (-1, limits["memory_mb"]) if ground.cgroups is None else (ground.cgroups.place(name, limits), None)


def _environment(spec: Mapping[str, Any], home: str) -> dict[str, str]:
    path = f"{os.path.realpath(sys.base_prefix)}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8", "USER": "agent", **spec["env"]}
