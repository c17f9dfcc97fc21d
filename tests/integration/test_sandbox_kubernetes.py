"""The Kubernetes backend by itself on a real cluster: the ways to a pod, what images lack, what a cluster cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_node import Program
from sandboxes import sandbox_config

from agentrl.core.config import KubernetesConfig
from agentrl.core.errors import ConfigError, Ran, SandboxError, ServiceUnavailable, Unsupported
from agentrl.core.types import ExecRequest, ExecResult, SandboxLimits, SandboxSpec
from sandbox.backends.kubernetes import pods
from sandbox.backends.kubernetes.backend import KubernetesBackend
from sandbox.backends.kubernetes.manifests import BROUGHT
from sandbox.channel import Channel
from sandbox.runtime.interpreter import SEALED

SPEC = SandboxSpec(files={"note.txt": "hello\n"})
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "sandboxes.md"
WHO = ExecRequest(argv=("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))


@pytest.fixture
def config() -> KubernetesConfig:
    return sandbox_config("kubernetes").kubernetes


@pytest.fixture
def bare() -> KubernetesConfig:
    """With an image without Python, for which another one brings it."""
    return sandbox_config("kubernetes", bare=True).kubernetes


@asynccontextmanager
async def started(config: KubernetesConfig, **changes: Any) -> AsyncIterator[KubernetesBackend]:
    backend = KubernetesBackend(config.model_copy(update=changes))
    await backend.start(lambda sandbox_id, cause: None)
    try:
        yield backend
    finally:
        await backend.stop()


async def run(channel: Channel, request: ExecRequest, key: str) -> ExecResult:
    answer = await channel.request("POST", "/exec", body=request.model_dump_json().encode(), key=key)
    assert answer.status == 200, answer.body
    return ExecResult.model_validate_json(answer.body)


def as_a_pod_sees_us(pod_ip: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((pod_ip, 9))
        return str(route.getsockname()[0])


def address(backend: KubernetesBackend, name: str) -> str:
    assert backend._watch is not None
    found = pods.address(backend._watch.pods[name])
    assert found is not None
    return found


@contextmanager
def no_route(*hosts: str) -> Iterator[None]:
    """As a network policy or a missing route would have it, whose router says so."""
    for host in hosts:
        subprocess.run(["ip", "route", "add", "unreachable", f"{host}/32"], check=True)
    try:
        yield
    finally:
        for host in hosts:
            subprocess.run(["ip", "route", "del", "unreachable", f"{host}/32"], check=True)


class Account:
    """A service account with a kubeconfig of its own, made by the one that the test has."""

    def __init__(self, config: KubernetesConfig, folder: Path) -> None:
        self.config, self.name = config, config.controller
        self.kubeconfig = folder / "kubeconfig"
        self._kubectl("create", "serviceaccount", self.name)
        token = self._kubectl("create", "token", self.name).strip()
        (cluster,) = json.loads(self._kubectl("config", "view", "--raw", "--minify", "-o", "json"))["clusters"]
        whole = {
            "clusters": [cluster],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": cluster["name"], "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(whole))

    def may(self, rules: list[Any]) -> None:
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": self.name}}
        self._kubectl("apply", "-f", "-", given=json.dumps({**role, "rules": rules}))
        account = f"--serviceaccount={self.config.namespace}:{self.name}"
        self._kubectl("create", "rolebinding", self.name, f"--role={self.name}", account)

    def end(self) -> None:
        for kind in ("rolebinding", "role", "serviceaccount"):
            self._kubectl("delete", kind, self.name, "--ignore-not-found")

    def _kubectl(self, *words: str, given: str = "") -> str:
        command = ["kubectl", "--kubeconfig", self.config.kubeconfig, "-n", self.config.namespace, *words]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def account(config: KubernetesConfig, tmp_path: Path) -> Iterator[Account]:
    made = Account(config, tmp_path)
    yield made
    made.end()


async def test_the_rights_that_the_documentation_names_are_enough_and_needed(
    config: KubernetesConfig, account: Account
) -> None:
    limited = config.model_copy(update={"kubeconfig": str(account.kubeconfig)})
    with pytest.raises(ConfigError, match="this account needs"):
        await KubernetesBackend(limited).start(lambda sandbox_id, cause: None)
    (block,) = re.findall(r"```yaml\n(rules:\n.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    account.may(yaml.safe_load(block)["rules"])
    async with started(limited, way_in="exec") as backend:
        await backend.create("limited", SPEC, "test")
        channel = backend.channel("limited")
        assert b"carry import main" in (await run(channel, WHO, "a")).stdout
        channel.close()
        await backend.destroy("limited")


async def test_by_exec_everything_goes_as_by_ip(config: KubernetesConfig) -> None:
    async with started(config, way_in="exec") as backend:
        await backend.create("by-exec", SPEC, "test")
        channel = backend.channel("by-exec")
        said = (await run(channel, WHO, "a")).stdout
        assert said.count(b"carry import main") == 1, "it shows which way this came"
        data = os.urandom(1 << 20) * 8
        echoed = await run(channel, ExecRequest(argv=("cat",), stdin=data, cap_bytes=len(data)), "b")
        assert echoed.stdout == data
        channel.close()
        other = backend.channel("by-exec")
        assert (await run(other, WHO, "c")).stdout.count(b"carry import main") == 1, "the first one's carrier has ended"
        spy = "for p in /proc/[0-9]*; do ls $p/fd; head -c 1 $p/environ; head -c 1 $p/mem; done > /dev/null"
        refused = (await run(other, ExecRequest(argv=("sh", "-c", spy)), "d")).stderr
        assert refused.count(b"ermission denied") == 6, "neither the runtime nor the carrier can be read"
        other.close()


async def test_a_task_that_kills_the_carrier_breaks_a_connection_and_no_more(config: KubernetesConfig) -> None:
    async with started(config, way_in="exec") as backend:
        await backend.create("killer", SPEC, "test")
        channel = backend.channel("killer")
        with pytest.raises(ServiceUnavailable) as broken:
            await run(channel, ExecRequest(argv=("sh", "-c", "kill -9 -1; kill -9 $$")), "k")
        assert broken.value.ran is Ran.MAYBE
        answer = await channel.request("GET", "/exec?key=k")
        assert ExecResult.model_validate_json(answer.body).status == "SIGNALED"
        channel.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="run as root, so that the test can take a pod's route away")
async def test_where_pod_ips_cannot_be_reached_it_goes_by_exec(config: KubernetesConfig) -> None:
    async with started(config) as backend, started(config, way_in="ip", controller=f"{config.controller}-ip") as by_ip:
        await backend.create("no-route", SPEC, "test")
        await by_ip.create("no-route-ip", SPEC, "test")
        with no_route(address(backend, "no-route"), address(by_ip, "no-route-ip")):
            channel, refused = backend.channel("no-route"), by_ip.channel("no-route-ip")
            assert b"carry import main" in (await run(channel, WHO, "a")).stdout
            with pytest.raises(ServiceUnavailable) as lost:
                await run(refused, WHO, "a")
            assert lost.value.ran is Ran.NO
            channel.close()


@pytest.mark.parametrize("changes", [{}, {"runtime_image": "from itself"}], ids=["of the image", "brought"])
async def test_without_python_anywhere_it_is_unsupported(config: KubernetesConfig, changes: dict[str, str]) -> None:
    changes = dict.fromkeys(changes, config.image)
    async with started(config, python="python9", **changes) as backend:
        with pytest.raises(Unsupported, match=r"has no python9.*runtime_image"):
            await backend.create("no-python", SPEC, "test")


@pytest.mark.parametrize("user", ["own", "image"])
async def test_python_is_brought_into_images_without_it(bare: KubernetesConfig, user: str) -> None:
    async with started(bare, way_in="exec", user=user) as backend:
        await backend.create(f"brought-{user}", SPEC, "test")
        channel = backend.channel(f"brought-{user}")
        assert b"carry import main" in (await run(channel, WHO, "a")).stdout
        write = "echo x > $0/lib/ld.so || rm -r $0/lib || mv $0 $0.old || mv ${0%/*} /old || cat $0/$1"
        script = f"{write} || env | grep -E 'LD_|PYTHON|LC_|SANDBOXD'"
        assert (await run(channel, ExecRequest(argv=("sh", "-c", script, BROUGHT, SEALED)), "b")).exit_code == 1
        assert (await channel.request("GET", "/files?path=note.txt")).body == b"hello\n"
        channel.close()


async def test_a_python_that_cannot_be_brought_says_why(bare: KubernetesConfig) -> None:
    async with started(bare, runtime_image=bare.image, python="false") as backend:
        with pytest.raises(SandboxError, match=r"not brought by sandbox\.kubernetes\.runtime_image"):
            await backend.create("false", SPEC, "test")


async def test_an_image_that_is_nowhere_says_so(config: KubernetesConfig) -> None:
    async with started(config, pull="Never") as backend:
        with pytest.raises(Exception, match="ErrImageNeverPull"):
            await backend.create("no-image", SPEC.model_copy(update={"image": "registry.local/nowhere:1"}), "test")


async def test_what_a_cluster_cannot_do_is_unsupported(config: KubernetesConfig) -> None:
    async with started(config) as backend:
        for attempt in (backend.pause("x"), backend.resume("x"), backend.snapshot("x", "y")):
            with pytest.raises(Unsupported, match="Kubernetes"):
                await attempt
        with pytest.raises(Unsupported, match="snapshots"):
            await backend.create("x", SPEC.model_copy(update={"snapshot": "y"}), "test")
        await backend.forget_snapshot("y")


async def test_a_pod_reaches_what_egress_allows_and_no_more(config: KubernetesConfig) -> None:
    async with started(config) as closed:
        await closed.create("closed", SPEC, "test")
        here = as_a_pod_sees_us(address(closed, "closed"))
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), here, 0)
        where = listener.sockets[0].getsockname()
        connect = ExecRequest(argv=("python3", "-c", f"import socket; socket.create_connection({where!r}, 1)"))
        rules = ({"to": [{"ipBlock": {"cidr": f"{here}/32"}}]},)
        async with started(config, controller=f"{config.controller}-o", egress=rules) as opened, listener:
            await opened.create("opened", SPEC, "test")
            channels = closed.channel("closed"), opened.channel("opened")
            codes = [(await run(channel, connect, "k")).exit_code for channel in channels]
            for channel in channels:
                channel.close()
    assert codes == [1, 0]


async def test_required_isolation_is_tried_out(config: KubernetesConfig) -> None:
    backend = KubernetesBackend(config, require_isolation=True)
    await backend.start(lambda sandbox_id, cause: None)
    await backend.stop()
    with Program("network_policies").frozen(), pytest.raises(ConfigError, match="not enforce NetworkPolicies"):
        await KubernetesBackend(config, require_isolation=True).start(lambda sandbox_id, cause: None)
    async with started(config) as next_one:
        assert not (await next_one.inventory()).live, "the next one ends what the refused start left"


async def test_a_full_volume_on_the_nodes_disk_is_an_eviction(config: KubernetesConfig) -> None:
    ended: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    spec = SPEC.model_copy(update={"limits": SandboxLimits(disk_mb=16)})
    backend = KubernetesBackend(config.model_copy(update={"disk": "node"}))
    await backend.start(lambda sandbox_id, cause: ended.set_result((sandbox_id, cause)))
    try:
        await backend.create("full", spec, "test")
        channel = backend.channel("full")
        fill = ExecRequest(argv=("sh", "-c", "head -c 64000000 /dev/zero > big"))
        assert (await run(channel, fill, "k")).exit_code == 0, "nothing keeps it from writing"
        channel.close()
        async with asyncio.timeout(120):
            sandbox_id, cause = await ended
        assert sandbox_id == "full"
        assert "evicted" in cause
        assert "exceeds" in cause
    finally:
        await backend.stop()
