"""The Kubernetes backend: one pod a sandbox, reached at its IP. Constructed by `sandbox.api`; called by `controller`.

Invariants: only objects with this controller's labels are touched; what the cluster knows is what is known, so a
restarted controller, or another replica of it, finds its sandboxes and their tokens there; a pod that ended by
itself is reported once and removed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine
from pathlib import PurePosixPath
from urllib.parse import quote

import orjson

from agentrl.core.config import KubernetesConfig
from agentrl.core.errors import (
    AgentRLError,
    CapacityError,
    ConfigError,
    Ran,
    SandboxError,
    ServiceUnavailable,
    Unsupported,
    from_envelope,
)
from agentrl.core.types import SandboxSpec
from sandbox.backends.base import Ended, Inventory
from sandbox.backends.kubernetes import manifests, pods, probe
from sandbox.backends.kubernetes.cluster import Cluster, Object, pause_between_tries
from sandbox.backends.kubernetes.reach import Reach
from sandbox.backends.kubernetes.watch import PodWatch
from sandbox.channel import Channel, Stream

log = logging.getLogger(__name__)

NETWORKING = "networking.k8s.io/v1"
GRACE_S = 1
FORCE_AFTER_S = 30.0
"""Seconds that a node has to confirm a deletion before the pod is removed without it."""
END_S = 1.0
"""Seconds that a runtime has to end itself; its pod is being deleted anyway."""
CONFLICTS = 6
"""Times that a deletion is tried against conflicts."""
KEPT_CAUSES = 10_000


class KubernetesBackend:
    """Sandboxes as pods of one namespace."""

    def __init__(self, config: KubernetesConfig, *, require_isolation: bool = False) -> None:
        self._config = config
        self._require_isolation = require_isolation
        self.isolation = config.runtime_class or "containers"
        self._cluster: Cluster | None = None
        self._watch: PodWatch | None = None
        self._reach = Reach(config)
        self._owner_uid = ""
        self._runtime: Object = {}
        self._ended: Ended = lambda sandbox_id, cause: None
        self._destroying: set[str] = set()
        self._causes: OrderedDict[str, str] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- start and stop ------------------------------------------------------------------------

    async def start(self, ended: Ended) -> None:
        self._ended = ended
        config = self._config
        cluster = self._cluster = await Cluster.connect(
            kubeconfig=config.kubeconfig, context=config.context, namespace=config.namespace
        )
        try:
            await self._prepare(cluster)
            self._watch = PodWatch(cluster, manifests.selector(config.controller), self._changed)
            await self._watch.start()
            if self._require_isolation and not config.egress:
                await self._try_network()
        except BaseException:
            if self._watch is not None:
                await self._watch.stop()
            self._cluster = self._watch = None
            await cluster.close()
            raise

    async def _prepare(self, cluster: Cluster) -> None:
        """The objects that all sandboxes share; those of an earlier start are kept."""
        controller = self._config.controller
        try:
            owner = await self._ensure(cluster, "configmaps", manifests.owner(controller))
            self._owner_uid = owner["metadata"]["uid"]
            self._runtime = manifests.runtime(controller, self._owner_uid)
            await self._ensure(cluster, "configmaps", self._runtime)
        except SandboxError as error:
            raise ConfigError(
                f"namespace {cluster.namespace} cannot be used for sandboxes: {error}. It must exist, and this "
                "account needs create, get, list, watch, patch and delete on pods and configmaps in it"
            ) from error
        policy = manifests.network_policy(controller, self._owner_uid, self._config)
        try:
            await self._ensure(cluster, "networkpolicies", policy, group=NETWORKING)
        except SandboxError as error:
            if self._require_isolation:
                raise ConfigError(f"sandbox.require_isolation is set, but the NetworkPolicy: {error}") from error
            log.warning("SANDBOXES HAVE NO NETWORK POLICY and may reach what pods reach: %s", error)

    async def _try_network(self) -> None:
        """By a pod of its own: ConfigError when it comes out."""
        _, watch = self._connected()
        name = f"probe-{secrets.token_hex(4)}"
        try:
            await self.create(name, SandboxSpec(), "")
            channel, address = self.channel(name), pods.address(watch.pods[name])
            try:
                out = address is not None and await probe.reaches_us(channel, address, self._config)
            finally:
                channel.close()
        finally:
            await self.destroy(name)
        if out:
            raise ConfigError(
                "sandbox.require_isolation is set, but a pod connected to the controller: this cluster's network does "
                "not enforce NetworkPolicies. Give it one that does, or unset require_isolation"
            )

    async def _ensure(self, cluster: Cluster, what: str, wanted: Object, *, group: str = "") -> Object:
        """Create an object, or bring the one of that name to what is wanted."""
        name = wanted["metadata"]["name"]
        reply = await cluster.call("POST", what, body=wanted, allow=(409,), group=group)
        if reply.status != 409:
            return reply.body
        if wanted.get("immutable"):
            return (await cluster.call("GET", f"{what}/{name}", group=group)).body
        return (await cluster.call("PATCH", f"{what}/{name}", body=wanted, group=group)).body

    async def stop(self) -> None:
        cluster, watch = self._connected()
        try:
            await asyncio.gather(*(self.destroy(name) for name in list(watch.pods)))
            owner = manifests.owner_name(self._config.controller)
            query = {"propagationPolicy": "Background"}
            await cluster.call("DELETE", f"configmaps/{owner}", query=query, allow=(404,))
        finally:
            await self.detach()

    async def detach(self) -> None:
        """Let go of the cluster and its sandboxes; their leases run on."""
        cluster, watch = self._connected()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reach.close()
        await watch.stop()
        await cluster.close()
        self._cluster = self._watch = None

    def _connected(self) -> tuple[Cluster, PodWatch]:
        if self._cluster is None or self._watch is None:
            raise SandboxError("the kubernetes backend is not started", ran=Ran.NO)
        return self._cluster, self._watch

    # --- sandboxes -----------------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        if spec.snapshot:
            raise Unsupported("Kubernetes makes no snapshots of pods to begin from")
        if not (spec.image or self._config.image):
            raise Unsupported("the spec names no image and sandbox.kubernetes.image is not set")
        cluster, watch = self._connected()
        manifest = manifests.pod(
            sandbox_id, spec, config=self._config, owner_uid=self._owner_uid, runtime_map=self._runtime,
            token=secrets.token_urlsafe(24), owner=owner,
        )  # fmt: skip
        reply = await cluster.call("POST", "pods", body=manifest, allow=(409,))
        if reply.status == 409:
            raise SandboxError(f"pod {sandbox_id} exists already: take a fresh key", ran=Ran.NO)
        watch.learned(reply.body)
        await self._started(sandbox_id)
        channel = self.channel(sandbox_id)
        try:
            await self._serving(sandbox_id, channel)
            for path, text in spec.files.items():
                await _put(channel, path, text)
        finally:
            channel.close()

    async def destroy(self, sandbox_id: str) -> None:
        _, watch = self._connected()
        # Until the watch says that it is gone: what happens to the pod in between is our doing.
        self._destroying.add(sandbox_id)
        try:
            known = watch.pods.get(sandbox_id)
            # A pod that cannot start has nothing that its node could end, and a lost node ends nothing.
            graceful = known is None or not (pods.node_is_gone(known) or pods.broken(known))
            if graceful and not await self._deleted(sandbox_id, GRACE_S):
                log.warning("pod %s: its node does not confirm the deletion, so it is removed without", sandbox_id)
                graceful = False
            if not graceful:
                await self._deleted(sandbox_id, 0)
                watch.forget(sandbox_id)
        finally:
            pod = watch.pods.get(sandbox_id)
            if pod is None or not pods.dead(pod):
                self._destroying.discard(sandbox_id)

    async def _deleted(self, sandbox_id: str, grace_s: int) -> bool:
        """Delete a pod and wait until nothing of it runs; False when its node is slow. 0: do not ask it."""
        cluster, watch = self._connected()
        query, watched = {"gracePeriodSeconds": str(grace_s)}, sandbox_id in watch.pods
        for attempt in range(CONFLICTS):
            reply = await cluster.call("DELETE", f"pods/{sandbox_id}", query=query, allow=(404, 409))
            if reply.status != 409:
                break
            # Somebody changed the pod in between, e.g. its node.
            await pause_between_tries(attempt)
        if reply.status == 404:
            watch.forget(sandbox_id)
            return True
        # What the watch knew may be gone by now, and would never go again; so may a pod that never got a node.
        if not watched and reply.body.get("metadata", {}).get("deletionGracePeriodSeconds"):
            watch.learned(reply.body)
        if grace_s:
            await self._told_to_end(sandbox_id)
        try:
            return await watch.until(sandbox_id, pods.dead, FORCE_AFTER_S)
        except TimeoutError:
            return False

    async def _told_to_end(self, sandbox_id: str) -> None:
        """Its runtime ends everything at once; what cannot be reached waits for the kubelet's KILL."""
        channel = self.channel(sandbox_id)
        try:
            await channel.request("POST", "/end", timeout_s=END_S)
        except ServiceUnavailable as error:
            log.debug("pod %s: as asked, %s", sandbox_id, error)
        finally:
            channel.close()

    async def inventory(self) -> Inventory:
        _, watch = self._connected()
        watch.check()
        live = {name for name, pod in watch.pods.items() if name not in self._destroying and pods.ended(pod) is None}
        return Inventory(live=frozenset(live), ended=dict(self._causes))

    def channel(self, sandbox_id: str) -> Channel:
        cluster, watch = self._connected()
        made = watch.pods.get(sandbox_id)

        async def connect() -> Stream:
            pod = watch.pods.get(sandbox_id)
            host = pods.address(pod) if pod is not None else None
            if host is None:
                raise ConnectionError("its pod does not run")
            return await self._reach.connect(cluster, sandbox_id, host)

        return Channel(sandbox_id, connect, token=pods.token(made) if made is not None else "")

    async def pause(self, sandbox_id: str) -> None:
        raise Unsupported("Kubernetes cannot pause a pod")

    async def resume(self, sandbox_id: str) -> None:
        raise Unsupported("Kubernetes cannot resume a pod")

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None:
        raise Unsupported("Kubernetes makes no snapshots of pods")

    async def forget_snapshot(self, snapshot_id: str) -> None:
        """There are none."""

    async def snapshots(self) -> frozenset[str]:
        return frozenset()

    # --- how a pod comes to serve --------------------------------------------------------------

    async def _started(self, sandbox_id: str) -> None:
        """Wait for the container, and say why it will never run as soon as that is known."""
        _, watch = self._connected()

        def progress(pod: Object | None) -> str | None:
            if pod is None:
                raise SandboxError(f"pod {sandbox_id} was deleted before it ran", ran=Ran.NO)
            if (lacking := pods.lacks_interpreter(pod)) is not None:
                image = self._config.runtime_image or "the image"
                raise Unsupported(
                    f"{image} has no {self._config.python}, in which sandboxd runs: set sandbox.kubernetes."
                    f"runtime_image to an image that has, from which pods get it: {lacking}"
                )
            why = pods.ended(pod) or pods.broken(pod)
            if why is not None:
                raise SandboxError(f"pod {sandbox_id} did not start: {why}", ran=Ran.NO)
            if pods.address(pod) is not None:
                return "started"
            return "unschedulable" if pods.unschedulable(pod) is not None else None

        try:
            if await watch.until(sandbox_id, progress, self._config.start_s) == "unschedulable":
                await self._scheduled(sandbox_id)
                await watch.until(sandbox_id, lambda pod: progress(pod) == "started" or None, self._config.start_s)
        except TimeoutError:
            raise SandboxError(
                f"pod {sandbox_id} did not start within {self._config.start_s:.0f} s (sandbox.kubernetes.start_s)",
                ran=Ran.NO,
            ) from None

    async def _scheduled(self, sandbox_id: str) -> None:
        """CAPACITY when no node takes the pod for so long that an autoscaler would have brought one."""
        _, watch = self._connected()

        def taken(pod: Object | None) -> bool | None:
            return pod is None or pods.unschedulable(pod) is None or None

        try:
            await watch.until(sandbox_id, taken, self._config.unschedulable_s)
        except TimeoutError:
            pod = watch.pods.get(sandbox_id)
            why = pods.unschedulable(pod) if pod else None
            raise CapacityError(f"no node takes pod {sandbox_id}: {why}", detail={"retry_after_s": 5.0}) from None

    async def _serving(self, sandbox_id: str, channel: Channel) -> None:
        """Wait until sandboxd answers; its container runs some milliseconds before."""
        _, watch = self._connected()
        deadline = asyncio.get_running_loop().time() + self._config.start_s
        while True:
            try:
                await channel.request("GET", "/health")
                return
            except ServiceUnavailable as error:
                pod = watch.pods.get(sandbox_id)
                cause = pods.ended(pod) if pod else self._causes.get(sandbox_id, "its pod was deleted")
                if cause is not None:
                    why = f"pod {sandbox_id} ended before it served: {cause}"
                    raise SandboxError(why, ran=Ran.NO) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.02)

    # --- what happens by itself ----------------------------------------------------------------

    def _changed(self, name: str, pod: Object | None) -> None:
        """The watch says that a pod is new, other than before, or gone."""
        if name in self._destroying:
            if pod is None:
                self._destroying.discard(name)
            return
        cause = pods.ended(pod) if pod is not None else "its pod was deleted by somebody else"
        if cause is None or name in self._causes:
            return
        self._causes[name] = cause
        while len(self._causes) > KEPT_CAUSES:
            self._causes.popitem(last=False)
        self._ended(name, cause)
        if pod is not None:
            self._background(self._remove(name))

    async def _remove(self, name: str) -> None:
        """Take the remains of a pod that ended by itself out of the cluster."""
        try:
            await self.destroy(name)
        except AgentRLError as error:
            log.warning("the remains of pod %s stay until the next start: %s", name, error)

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _put(channel: Channel, path: str, text: str) -> None:
    """One file of the spec."""
    where = quote(str(PurePosixPath(path)), safe="")
    answer = await channel.request("PUT", f"/files?path={where}&mode=420", body=text.encode())
    if answer.status != 200:
        raise from_envelope(orjson.loads(answer.body), f"sandboxd refused {path!r} with {answer.status}")
