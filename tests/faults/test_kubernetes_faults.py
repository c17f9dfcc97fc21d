"""The Kubernetes backend on a real cluster whose parts are killed or frozen, and after many cycles."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import psutil
import pytest
from held import Held
from kube_node import Program, another_node
from sandboxes import TOKEN, ControllerProcess, sandbox_config, service, sh

from agentrl.core.config import SandboxConfig
from agentrl.core.errors import AgentRLError, Blame, SandboxLost, ServiceUnavailable
from agentrl.core.types import ExecRequest, SandboxSpec, SandboxState
from sandbox.backends.kubernetes import manifests
from sandbox.backends.kubernetes.cluster import Cluster
from sandbox.client import SandboxClient

SPEC = SandboxSpec(files={"note.txt": "hello\n"})
TRUE = ExecRequest(argv=("true",))


@pytest.fixture
def config() -> SandboxConfig:
    return sandbox_config("kubernetes", capacity=128)


@pytest.fixture
async def cluster(config: SandboxConfig) -> AsyncIterator[Cluster]:
    """To look at the cluster with."""
    kubernetes = config.kubernetes
    made = await Cluster.connect(kubeconfig=kubernetes.kubeconfig, context="", namespace=kubernetes.namespace)
    yield made
    await made.close()


async def none_live(client: SandboxClient) -> bool:
    return not await client.list()


async def names(cluster: Cluster, what: str, config: SandboxConfig) -> set[str]:
    items, _ = await cluster.list(what, manifests.selector(config.kubernetes.controller))
    return {item["metadata"]["name"] for item in items}


async def no_pods(cluster: Cluster, config: SandboxConfig) -> bool:
    return not await names(cluster, "pods", config)


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    """Nodes and the controller tidy up in the background."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


def runtimes(ids: Iterable[str]) -> list[int]:
    """First processes of these sandboxes' pods, which run on this machine if the cluster is the test's own."""
    pods = set(ids)
    found = (p.info for p in psutil.process_iter(["pid", "cmdline"]))
    lines = ((info["pid"], " ".join(info["cmdline"] or ())) for info in found)
    return [pid for pid, line in lines if "sandbox.runtime.pod" in line and any(name in line for name in pods)]


async def test_killed_controller_adopts_its_pods_again(config: SandboxConfig, cluster: Cluster, tmp_path: Path) -> None:
    process = ControllerProcess(tmp_path / "a", settings=config.model_dump(mode="json"))
    await process.start()
    client = SandboxClient(process.url, token=TOKEN)
    other = sandbox_config("kubernetes")
    held = Held(client, seconds=4)
    await held.start(6)
    assert await process.signal(signal.SIGKILL) == -signal.SIGKILL
    ids = held.ids
    async with service(tmp_path / "b", other) as another:
        assert await names(cluster, "pods", config) == ids
        assert not await another.list()
    assert await names(cluster, "pods", config) == ids, "a controller with another name ended none of them"
    await process.start()
    assert {view.id for view in await client.list()} == ids
    await held.finish()
    await until(lambda: none_live(client))
    await client.close()
    await process.signal(signal.SIGTERM)
    await until(lambda: no_pods(cluster, config))


async def test_100_cycles_leak_nothing(config: SandboxConfig, cluster: Cluster, tmp_path: Path) -> None:
    ids: list[str] = []
    async with service(tmp_path, config) as client:

        async def cycles(worker: int, count: int) -> None:
            for i in range(count):
                async with client.acquire(SPEC, owner="test", key=f"{worker}-{i}") as sandbox:
                    ids.append(sandbox.id)
                    result = await sandbox.exec(sh("sleep 1000 & (setsid sleep 1000 &); cat note.txt"))
                    assert result.stdout == b"hello\n"

        ours = psutil.Process()
        await asyncio.gather(*(cycles(100 + worker, 1) for worker in range(10)))
        fds, threads, kept = ours.num_fds(), ours.num_threads(), await names(cluster, "configmaps", config)
        await asyncio.gather(*(cycles(worker, 10) for worker in range(10)))
        assert len(ids) == 110
        await until(lambda: none_live(client))
        await until(lambda: no_pods(cluster, config))
        assert not runtimes(ids)
        assert await names(cluster, "configmaps", config) == kept
        assert len(await client.list(live=False)) == 110
        # Connections to the API server are kept up to the pool's size.
        assert ours.num_fds() <= fds + 12
        assert ours.num_threads() <= threads + 8


async def test_while_the_api_server_is_away_commands_go_on_and_closes_come_later(
    config: SandboxConfig, cluster: Cluster, tmp_path: Path
) -> None:
    server = Program("apiserver")
    async with (
        service(tmp_path, config) as client,
        client.acquire(SPEC, owner="test", key="kept") as kept,
        client.acquire(SPEC, owner="test", key="closed meanwhile") as closed,
    ):
        with server.killed():
            closing = asyncio.create_task(closed.close())
            began = time.monotonic()
            while time.monotonic() - began < 10:
                assert (await kept.exec(sh("cat note.txt"))).stdout == b"hello\n"
                await asyncio.sleep(0.5)
            with pytest.raises(AgentRLError, match="Kubernetes, POST") as refused:
                async with client.acquire(SPEC, owner="test", key="made meanwhile"):
                    pass
            assert refused.value.blame is Blame.INFRA
            assert {view.id for view in await client.list()} == {kept.id, closed.id}
        assert (await kept.exec(sh("cat note.txt"))).stdout == b"hello\n"
        # The client may give up first: what it asked for stays asked for.
        assert isinstance(*await asyncio.gather(closing, return_exceptions=True), ServiceUnavailable | None)

        async def closed_at_last() -> bool:
            return (await client.view(closed.id)).state is SandboxState.CLOSED

        await until(closed_at_last)
        # The kubelet, which backs off for long, removes the rest of the pod some time later.
        assert not runtimes([closed.id])
        items, _ = await cluster.list("pods", manifests.selector(config.kubernetes.controller))
        staying = [item["metadata"] for item in items if "deletionTimestamp" not in item["metadata"]]
        assert [metadata["name"] for metadata in staying] == [kept.id]
        async with client.acquire(SPEC, owner="test", key="after") as after:
            assert (await after.exec(TRUE)).exit_code == 0


async def test_a_lost_node_is_a_lost_sandbox(config: SandboxConfig, cluster: Cluster, tmp_path: Path) -> None:
    kubelet = Program("kubelet")
    kubernetes = config.kubernetes.model_copy(update={"node_lost_s": 1})
    spec = SPEC.model_copy(update={"ttl_s": 600.0})
    async with (
        another_node(kubernetes.kubeconfig, "node-2"),
        service(tmp_path, config.model_copy(update={"kubernetes": kubernetes})) as client,
        client.acquire(spec, owner="test", key="k") as sandbox,
    ):

        async def lost() -> bool:
            return (await client.view(sandbox.id)).state is SandboxState.LOST

        with kubelet.frozen():
            assert (await sandbox.exec(TRUE)).exit_code == 0, "a kubelet that is silent for a moment is no lost node"
            await until(lost, 120)
            with pytest.raises(SandboxLost, match="its node node-1 is lost"):
                await sandbox.exec(TRUE)
            await until(lambda: no_pods(cluster, config))

    async def none_runs() -> bool:
        return not runtimes([sandbox.id])

    await until(none_runs)
