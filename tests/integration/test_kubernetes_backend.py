"""The Kubernetes backend against an API server that misbehaves on demand, with real runtimes in the pods' place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_kube import FakeKube
from fake_kubelet import FakeKubelet, state

from agentrl.core.config import KubernetesConfig
from agentrl.core.errors import (
    CapacityError,
    ConfigError,
    Ran,
    SandboxError,
    SandboxFileError,
    ServiceUnavailable,
    Unsupported,
)
from agentrl.core.types import SandboxSpec
from sandbox.backends.kubernetes import backend as under_test
from sandbox.backends.kubernetes.backend import KubernetesBackend

pytest.importorskip("kubernetes", reason="pip install 'agentrl[kubernetes]' to run this test")

SPEC = SandboxSpec(files={"note.txt": "hello"}, env={"COLOUR": "red"})


class Rig:
    """A cluster of one node, and backends on it."""

    def __init__(self, kube: FakeKube, kubelet: FakeKubelet, kubeconfig: Path) -> None:
        self.kube, self.kubelet, self.kubeconfig = kube, kubelet, kubeconfig
        self.ended: dict[str, str] = {}

    @asynccontextmanager
    async def backend(self, controller: str = "default", **settings: object) -> AsyncIterator[KubernetesBackend]:
        config = KubernetesConfig(
            kubeconfig=str(self.kubeconfig), image="python", controller=controller, start_s=20.0, **settings
        )  # type: ignore[arg-type]
        made = KubernetesBackend(config)
        await made.start(self.ended.__setitem__)
        try:
            yield made
        finally:
            await made.detach()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    kube = FakeKube()
    kubelet = FakeKubelet(kube, tmp_path / "node")
    async with kube.serve(tmp_path) as kubeconfig:
        yield Rig(kube, kubelet, kubeconfig)
    kubelet.close()


async def eventually(check: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not check():  # noqa: ASYNC110 (what is awaited happens behind a socket)
            await asyncio.sleep(0.01)


async def live(backend: KubernetesBackend) -> set[str]:
    return set((await backend.inventory()).live)


async def run(backend: KubernetesBackend, name: str, *argv: str) -> bytes:
    channel = backend.channel(name)
    answer = await channel.request("POST", "/exec", body=json.dumps({"argv": argv}).encode(), key="k" + argv[-1])
    channel.close()
    assert answer.status == 200, answer.body
    return answer.body


async def test_a_sandbox_serves_with_its_files_and_leaves_nothing(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        assert await live(backend) == {"sb-1"}
        assert b'"exit_code":0' in await run(backend, "sb-1", "sh", "-c", "test $COLOUR = red && test -s note.txt")
        with pytest.raises(SandboxError, match="exists already"):
            await backend.create("sb-1", SPEC, "test")
        await asyncio.gather(backend.destroy("sb-1"), backend.destroy("sb-1"))
        await backend.destroy("sb-1")
        await backend.destroy("sb-of-nobody")
        assert await live(backend) == set()
        assert (rig.kubelet.processes, rig.ended) == ({}, {})
        with pytest.raises(Unsupported):
            await backend.pause("sb-1")


async def test_a_file_that_leads_out_is_refused_as_the_runtime_says(rig: Rig) -> None:
    async with rig.backend() as backend:
        with pytest.raises(SandboxFileError, match="leads out"):
            await backend.create("sb-1", SandboxSpec(files={"../escape": "x"}), "test")
        await backend.destroy("sb-1")


async def test_the_runtime_refuses_whoever_lacks_the_token(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        environment = rig.kube.pod("sb-1")["spec"]["containers"][0]["env"]
        environment[0]["value"] = "another"
        rig.kube.update("sb-1", {})
        await eventually(lambda: "another" in str(backend._watch and backend._watch.pods))
        channel = backend.channel("sb-1")
        assert (await channel.request("GET", "/health")).status == 401
        channel.close()


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
async def test_by_exec_in_the_protocol_that_the_server_speaks(rig: Rig, protocol: str) -> None:
    rig.kube.exec_protocols = (protocol,)
    async with rig.backend(way_in="exec") as backend:
        await backend.create("sb-1", SPEC, "test")
        assert b'"exit_code":0' in await run(backend, "sb-1", "sh", "-c", "test -s note.txt")
        assert "EXEC sb-1" in rig.kube.requests
        # Connections that are not closed here end with the backend.
        channel = backend.channel("sb-1")
        assert (await channel.request("GET", "/health")).status == 200
    with pytest.raises(ServiceUnavailable):
        await channel.request("GET", "/health")
    channel.close()


async def test_a_server_that_speaks_no_known_protocol_runs_nothing(rig: Rig) -> None:
    rig.kube.exec_protocols = ("v9.channel.k8s.io",)
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
    async with rig.backend(way_in="exec") as backend:
        channel = backend.channel("sb-1")
        with pytest.raises(ServiceUnavailable, match="speaks neither") as refused:
            await channel.request("POST", "/exec", body=b"{}", key="k")
        assert refused.value.ran is Ran.NO
        channel.close()


async def test_a_compacted_history_means_listing_again(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        await backend.create("sb-2", SPEC, "test")
        rig.kube.drop_watches()
        rig.kubelet.kill("sb-1")
        rig.kube.remove("sb-1")
        rig.kube.compact()
        await eventually(lambda: "sb-1" in rig.ended)
        assert await live(backend) == {"sb-2"}
        await backend.create("sb-3", SPEC, "test")
        assert await live(backend) == {"sb-2", "sb-3"}


async def test_a_dropped_watch_goes_on_where_it_was(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        lists = rig.kube.requests.count("GET /api/v1/namespaces/agentrl-sandboxes/pods")
        for round_ in range(3):
            rig.kube.drop_watches()
            await backend.create(f"sb-{round_ + 2}", SPEC, "test")
        await eventually(lambda: rig.kube.watches == 1)
        watches = rig.kube.requests.count("GET /api/v1/namespaces/agentrl-sandboxes/pods") - lists
        assert watches >= 3
        assert backend._watch is not None
        assert backend._watch.relists == 1
        assert await live(backend) == {"sb-1", "sb-2", "sb-3", "sb-4"}


async def test_a_server_that_is_away_stops_no_command(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kube.away = True
        rig.kube.drop_watches()
        assert b'"exit_code":0' in await run(backend, "sb-1", "true")
        with pytest.raises(ServiceUnavailable):
            await backend.destroy("sb-1")
        assert await live(backend) == {"sb-1"}
        assert rig.ended == {}
        rig.kube.away = False
        await backend.destroy("sb-1")
        assert await live(backend) == set()


async def test_a_slow_list_declares_no_sandbox_created_meanwhile_gone(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kube.list_s = 0.5
        rig.kube.compact()
        await eventually(lambda: rig.kube.watches == 0)
        await asyncio.sleep(0.1)
        creating = asyncio.create_task(backend.create("sb-2", SPEC, "test"))
        await creating
        assert await live(backend) == {"sb-1", "sb-2"}
        assert rig.ended == {}


async def test_lists_come_in_pages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.backends.kubernetes.cluster.PAGE", 2)
    async with rig.backend() as backend:
        for number in range(5):
            await backend.create(f"sb-{number}", SPEC, "test")
    async with rig.backend() as again:
        assert await live(again) == {f"sb-{number}" for number in range(5)}


async def test_a_restarted_controller_adopts_its_own_and_touches_no_others(rig: Rig) -> None:
    async with rig.backend() as backend, rig.backend("other") as other:
        await backend.create("sb-1", SPEC, "test")
        await backend.create("sb-2", SPEC, "test")
        await other.create("sb-3", SPEC, "test")
    rig.kubelet.end("sb-2", 137, "OOMKilled")
    async with rig.backend() as again, rig.backend("other") as other:
        assert await live(again) == {"sb-1"}
        assert await live(other) == {"sb-3"}
        assert "out of memory" in (await again.inventory()).ended["sb-2"]
        assert b'"exit_code":0' in await run(again, "sb-1", "true")
        await eventually(lambda: ("pods", "sb-2") not in rig.kube.objects)


async def test_stop_ends_every_sandbox_and_the_owner(rig: Rig) -> None:
    async with rig.backend("other") as other:
        await other.create("sb-3", SPEC, "test")
        backend = KubernetesBackend(KubernetesConfig(kubeconfig=str(rig.kubeconfig), image="python"))
        await backend.start(rig.ended.__setitem__)
        await backend.create("sb-1", SPEC, "test")
        await backend.stop()
        assert [name for kind, name in rig.kube.objects if kind == "pods"] == ["sb-3"]
        assert ("configmaps", "agentrl-default") not in rig.kube.objects
        assert list(rig.kubelet.processes) == ["sb-3"]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "evicted from node-1: low on disk"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "max_age_s"),
        ({"containerStatuses": [state(terminated={"exitCode": 137, "reason": "OOMKilled"})]}, "OOMKilled"),
        ({"containerStatuses": [state(terminated={"exitCode": 3})]}, "the lease ended"),
        ({"phase": "Unknown", "reason": "NodeLost"}, "node node-1 is lost"),
    ],
)
async def test_a_sandbox_that_ended_is_reported_once_and_removed(
    rig: Rig, status: dict[str, object], cause: str
) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kube.update("sb-1", status)
        await eventually(lambda: ("pods", "sb-1") not in rig.kube.objects)
        assert cause in rig.ended["sb-1"]
        assert cause in (await backend.inventory()).ended["sb-1"]
        assert await live(backend) == set()


async def test_a_lost_node_confirms_nothing_and_holds_nothing_up(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kubelet.silent = True
        taint = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        rig.kube.pod("sb-1")["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        rig.kube.update("sb-1", {"conditions": [taint]})
        await eventually(lambda: ("pods", "sb-1") not in rig.kube.objects)
        assert rig.ended["sb-1"] == "its node node-1 is lost (DeletionByTaintManager)"


async def test_destroy_does_not_wait_for_ever_for_a_silent_node(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "FORCE_AFTER_S", 0.2)
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kubelet.silent = True
        await backend.destroy("sb-1")
        assert ("pods", "sb-1") not in rig.kube.objects
        assert await live(backend) == set()
        assert rig.ended == {}


@pytest.mark.parametrize(
    ("status", "error", "match"),
    [
        ({"containerStatuses": [state(waiting={"reason": "ErrImageNeverPull"})]}, SandboxError, "ErrImageNeverPull"),
        ({"phase": "Failed", "reason": "Evicted"}, SandboxError, "evicted"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: insufficient cpu"}]},
            CapacityError,
            "insufficient cpu",
        ),
    ],
)
async def test_a_pod_that_cannot_start_says_why(
    rig: Rig, status: dict[str, object], error: type[SandboxError], match: str
) -> None:
    rig.kubelet.silent = True
    async with rig.backend(unschedulable_s=0.1) as backend:
        creating = asyncio.create_task(backend.create("sb-1", SPEC, "test"))
        await eventually(lambda: ("pods", "sb-1") in rig.kube.objects)
        rig.kube.update("sb-1", status)
        with pytest.raises(error, match=match):
            await creating


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (403, {"reason": "Forbidden", "message": "exceeded quota: sandboxes"}, CapacityError),
        (403, {"reason": "Forbidden", "message": "may not create pods"}, SandboxError),
        (429, {"reason": "TooManyRequests"}, ServiceUnavailable),
        (500, {"reason": "InternalError"}, ServiceUnavailable),
    ],
)
async def test_what_the_server_refuses(rig: Rig, status: int, body: dict[str, str], error: type[Exception]) -> None:
    async with rig.backend() as backend:
        rig.kube.refusals.append(("POST", status, body))
        with pytest.raises(error):
            await backend.create("sb-1", SPEC, "test")
        await backend.create("sb-1", SPEC, "test")


async def test_a_conflicting_delete_is_tried_again(rig: Rig) -> None:
    async with rig.backend() as backend:
        await backend.create("sb-1", SPEC, "test")
        rig.kube.refusals.append(("DELETE", 409, {"reason": "Conflict"}))
        await backend.destroy("sb-1")
        assert ("pods", "sb-1") not in rig.kube.objects


async def test_shared_objects_are_brought_up_to_date_by_the_next_controller(rig: Rig) -> None:
    async with rig.backend():
        policy = rig.kube.objects["networkpolicies", "agentrl-default"]
        assert policy["spec"]["egress"] == []
        first = rig.kube.objects["configmaps", "agentrl-default"]["metadata"]["uid"]
    rule = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    async with rig.backend(egress=(rule,)):
        assert rig.kube.objects["networkpolicies", "agentrl-default"]["spec"]["egress"] == [rule]
        assert rig.kube.objects["configmaps", "agentrl-default"]["metadata"]["uid"] == first


async def refuses(starting: Awaitable[None], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        await starting


async def test_a_namespace_that_cannot_be_used_is_a_configuration_error(rig: Rig, tmp_path: Path) -> None:
    config = KubernetesConfig(kubeconfig=str(rig.kubeconfig), image="python")
    rig.kube.refusals.append(("POST", 404, {"reason": "NotFound", "message": 'namespaces "x" not found'}))
    await refuses(KubernetesBackend(config).start(rig.ended.__setitem__), "must exist")
    nowhere = config.model_copy(update={"kubeconfig": str(tmp_path / "nowhere")})
    await refuses(KubernetesBackend(nowhere).start(rig.ended.__setitem__), "kubeconfig")
