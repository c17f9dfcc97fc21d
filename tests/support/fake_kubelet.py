"""A node for the fake API server: runs each pod's sandboxd as a process here, on a loopback address of its own.

Invariant: a pod that it confirms as gone has no process left.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
from fake_kube import FakeKube, Object

SERVE = "from sandbox.runtime.pod import main; main()"
NODE = "node-1"
_ADDRESSES = itertools.count(2)


class FakeKubelet:
    """Set `silent` and it does nothing any more, like a node that was lost."""

    def __init__(self, kube: FakeKube, folder: Path) -> None:
        self.kube, self.folder = kube, folder
        self.silent = False
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        kube.created = self._start
        kube.deleting = self._stop

    def _start(self, pod: Object) -> None:
        if self.silent:
            return
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        number = next(_ADDRESSES)
        ip = f"127.77.{number // 250}.{number % 250 + 1}"
        workdir = self.folder / name
        workdir.mkdir(parents=True)
        *_, config, _pids = container["command"]
        asked = json.loads(config) | {"host": ip, "workdir": str(workdir)}
        del asked["volume_mb"]  # There are no volumes here.
        changed = json.dumps(asked)
        tokens = {entry["name"]: entry["value"] for entry in container["env"]}
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-c", SERVE, changed, "0"], env={**os.environ, **tokens}
        )
        pod["spec"]["nodeName"] = NODE
        self.kube.update(name, {"phase": "Running", "podIP": ip, "containerStatuses": [state(running={})]})

    def _stop(self, pod: Object) -> None:
        if not self.silent:
            self.kill(pod["metadata"]["name"])
            self.kube.remove(pod["metadata"]["name"])

    def kill(self, name: str) -> None:
        """End a pod's process, without a word to the API server."""
        process = self.processes.pop(name, None)
        if process is not None:
            runtime = psutil.Process(process.pid)
            runtime.suspend()
            for one in [*runtime.children(recursive=True), runtime]:
                one.kill()
            process.wait()

    def end(self, name: str, exit_code: int, reason: str) -> None:
        """A pod whose container ended by itself."""
        self.kill(name)
        terminated = {"exitCode": exit_code, "reason": reason}
        self.kube.update(name, {"phase": "Failed", "containerStatuses": [state(terminated=terminated)]})

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


def state(**fields: Object) -> Object:
    return {"name": "sandbox", "state": fields}
