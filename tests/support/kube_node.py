"""The programs of the test cluster that `.ci/kube` started, to be frozen or killed for a while. Used by fault tests.

Invariant: a program that was killed is started again as it was, with its arguments, folder and log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from sandbox.backends.kubernetes.cluster import Cluster, Object

STATE = "AGENTRL_TEST_KUBE_STATE"


class Program:
    """One of them, e.g. `kubelet`. Skips the test where the cluster is not ours to break."""

    def __init__(self, name: str) -> None:
        if STATE not in os.environ:
            pytest.skip(f"set {STATE} to the folder of a cluster that `.ci/kube start` made, to break it for this test")
        self.name, self.folder = name, Path(os.environ[STATE])

    @property
    def pid(self) -> int:
        lines = (self.folder / "pids").read_text().split("\n")
        return next(int(line.split()[0]) for line in lines if line.endswith(f" {self.name}"))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        process = psutil.Process(self.pid)
        command, folder = process.cmdline(), process.cwd()
        process.kill()
        psutil.wait_procs([process])
        try:
            yield
        finally:
            with (self.folder / "log" / f"{self.name}.log").open("ab") as log:
                # In a session of its own: it outlives the test.
                again = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            pids = self.folder / "pids"
            lines = [line for line in pids.read_text().splitlines() if not line.endswith(f" {self.name}")]
            pids.write_text("".join(f"{line}\n" for line in [*lines, f"{again.pid} {self.name}"]))
            # Not ours to wait for.
            again.returncode = 0


LEASES, LEASE_S = "coordination.k8s.io/v1", 5.0


@asynccontextmanager
async def another_node(kubeconfig: str, name: str) -> AsyncIterator[None]:
    """A node that takes no pods and stays healthy: where no node is, the cluster gives up none of them."""
    kubectl = ["kubectl", "--kubeconfig", kubeconfig]
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now()[:19] + "Z"}
    node = {"metadata": {"name": name}, "spec": {"unschedulable": True}, "status": {"conditions": [ready]}}
    made = json.dumps({"apiVersion": "v1", "kind": "Node", **node}).encode()
    await asyncio.to_thread(subprocess.run, [*kubectl, "create", "-f", "-"], input=made, check=True)
    leases = await Cluster.connect(kubeconfig=kubeconfig, context="", namespace="kube-node-lease")
    lease: Object = {"metadata": {"name": name}, "spec": {"holderIdentity": name, "leaseDurationSeconds": 40}}
    await leases.call("POST", "leases", body=lease, group=LEASES, allow=(409,))

    async def renew() -> None:
        while True:
            await leases.call("PATCH", f"leases/{name}", body={"spec": {"renewTime": now()}}, group=LEASES)
            await asyncio.sleep(LEASE_S)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        await leases.close()
        await asyncio.to_thread(subprocess.run, [*kubectl, "delete", "node", name], check=True)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
