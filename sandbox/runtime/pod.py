"""sandboxd as a pod's first process: `... CONFIG_JSON PIDS`, the token in SANDBOXD_TOKEN.

Started by the Kubernetes backend's pods. Invariant: no task may trace the runtime, read its token or use up the
processes of other pods, although all that it starts runs under its own uid.
Standard library only, Python 3.7+.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import NoReturn

from sandbox.runtime.hardening import hide_memory, import_no_more
from sandbox.runtime.sandboxd import Config, Daemon, listen
from sandbox.runtime.wire import Connection

CLOSED = 0
"""Exit code when the controller closed the sandbox."""


class PodDaemon(Daemon):
    """A kubelet's TERM does not end an init that is deaf to the signals of its tasks, and its KILL comes 2 s later: so
    the controller, which has the token, ends it by `POST /end`."""

    def _route(
        self, connection: Connection, route: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        if route == "POST /end":
            self.exit(CLOSED)
        super()._route(connection, route, query, headers, body)


def main() -> NoReturn:
    config, pids = json.loads(sys.argv[1]), int(sys.argv[2])
    if pids:
        resource.setrlimit(resource.RLIMIT_NPROC, (pids, pids))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    token = os.environ.pop("SANDBOXD_TOKEN")
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": config["workdir"], **config["env"]}
    os.makedirs(config["workdir"], exist_ok=True)
    if "volume_mb" in config:
        check_volume(config["workdir"], config["volume_mb"])
    signal.signal(signal.SIGCHLD, lambda *_: None)
    daemon = PodDaemon(Config(config["workdir"], config["ttl_s"], env, token=token), listen(config))
    # An init is deaf to signals from inside that it left at their defaults; Python had not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only now: the daemon opened what belongs to root once we cannot be traced.
    hide_memory()
    if config.get("writable_image"):
        import_no_more()
    daemon.serve()


def check_volume(path: str, most_mb: int) -> None:
    """A kubelet older than 1.22 makes volumes in memory as large as the node's half memory: better none than that."""
    volume = os.statvfs(path)
    size_mb = volume.f_blocks * volume.f_frsize >> 20
    if size_mb > most_mb:
        sys.exit(
            f"the volume at {path} has {size_mb} MiB instead of {most_mb}: this cluster limits no volumes in memory "
            "(SizeMemoryBackedVolumes, on since 1.22): set sandbox.kubernetes.disk to 'node'"
        )
