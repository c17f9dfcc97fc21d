"""The docker backend: one container a sandbox, with sandboxd as its init. Constructed by `sandbox.api`; called by
`controller`.

Invariants: only containers with this folder's controller label are ever touched; a container that ended is removed
once its cause is known, so that what the engine lists is what lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, ConfigError, Ran, SandboxError, ServiceUnavailable, from_envelope
from agentrl.core.types import SandboxSpec
from sandbox.backends.base import Ended, Inventory
from sandbox.backends.docker import carried, elsewhere
from sandbox.backends.docker.container import (
    CONTROLLER,
    EGRESS,
    PROXY,
    Start,
    creation,
    handed_over,
    image_of,
    state_cause,
    without_quotas,
)
from sandbox.backends.docker.containers import Containers
from sandbox.backends.docker.elsewhere import Elsewhere
from sandbox.backends.docker.ends import Ends
from sandbox.backends.docker.engine import Engine, is_absent
from sandbox.backends.docker.handoff import Handoff, listens
from sandbox.backends.docker.images import Images
from sandbox.backends.docker.keeping import Keeper
from sandbox.channel import Channel, Stream, connect_unix
from sandbox.egress import EgressProxy, environment

log = logging.getLogger(__name__)

PROBE_S = 10.0
RUNNING = frozenset({"running", "paused", "restarting"})
ENDED = frozenset({"exited", "dead"})
NOTICE_S = 3.0


class DockerBackend:
    """Sandboxes as containers of a Docker Engine."""

    def __init__(self, folder: Path, config: DockerConfig, *, egress: EgressProxy | None = None) -> None:
        self.folder, self.config = folder, config
        self.isolation = "docker"
        self._folder_fd = -1
        self._engine: Engine | None = None
        self.containers: Containers
        self.images: Images
        self.keeper: Keeper
        self._controller = ""
        self._carried: Path
        """The runtime."""
        self._elsewhere: Elsewhere | None = None
        """For an engine that sees nothing of this machine."""
        self._egress = egress
        self._ends = Ends()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "started"
        return self._engine

    # --- start and stop ------------------------------------------------------------------------

    async def start(self, ended: Ended) -> None:
        self._ends.told = ended
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        self._controller = self._identity()
        self._engine = await asyncio.to_thread(Engine, self.config.host)
        try:
            self.containers = Containers(self._engine, self._controller)
            self.images = Images(self._engine, self.config)
            self.keeper = Keeper(self._engine, self.folder, self._controller)
            await self._check()
            await self._let_out()
            await self._adopt()
            await self._forget_runtimes()
        except BaseException:
            await self.detach()
            raise
        filters = {"type": "container", "event": ["die", "oom"], "label": f"{CONTROLLER}={self._controller}"}
        self._engine.watch(filters, self._event, lambda: self._background(self._reconcile()))
        self._background(self.images.prefetch())
        self._background(self.keeper.tidy())

    def _identity(self) -> str:
        """Who we are to the engine: a controller that is started again in this folder is the same one."""
        path = self.folder / "controller"
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(uuid.uuid4().hex)
        return path.read_text()

    async def _check(self) -> None:
        info = await self.engine.call("info")
        runtime = self.config.runtime or info["DefaultRuntime"]
        if runtime not in info["Runtimes"]:
            known = ", ".join(sorted(info["Runtimes"]))
            raise ConfigError(
                f"sandbox.docker.runtime = {runtime!r}: the engine at {self.engine.host} knows only {known}; install "
                "it there and name it under `runtimes` in the engine's daemon.json"
            )
        if self.config.disk == "quota" and (why := without_quotas(info)):
            raise ConfigError(f"sandbox.docker.disk = 'quota': {why}; use 'tmpfs', or 'unlimited' for no limit")
        remote = not self.engine.host.startswith("unix://")
        self.isolation = f"docker, {runtime}"
        here, there = (sys.platform, platform.machine()), (info["OSType"], info["Architecture"])
        if here != there:
            raise ConfigError(
                f"the engine at {self.engine.host} is on {'/'.join(there)}, but this controller's Python, which runs "
                f"in its containers, on {'/'.join(here)}: start the controller on a machine of that kind"
            )
        self._carried = await asyncio.to_thread(carried.prepared, self.folder)
        if self.config.way_in == "exec" or (remote and self.config.way_in == "auto"):
            self.isolation += "; by the exec API"
            log.warning("the sandboxes at %s are reached by the engine's exec API, which is slow", self.engine.host)
            self._elsewhere = Elsewhere(self.engine, self._controller, self._carried, self.folder)

    async def _let_out(self) -> None:
        """Serve the way out, in a folder that is mounted, so that sandboxes see a later controller's socket too."""
        if self._egress is None:
            return
        if self.config.network != "none" or self._elsewhere is not None:
            raise ConfigError("sandbox.egress needs sandbox.docker.network = 'none' and this machine's engine")
        (self.folder / "egress").mkdir(exist_ok=True)
        (self.folder / "egress").chmod(0o755)
        await self._egress.start(f"/proc/self/fd/{self._folder_fd}/egress/{PROXY}")

    async def _adopt(self) -> None:
        """Keep the containers of an earlier controller that serve; remove those that never came so far."""

        async def probe(sandbox_id: str, state: str) -> None:
            if state == "paused":
                return
            channel = self.channel(sandbox_id)
            try:
                await channel.request("GET", "/health", timeout_s=PROBE_S)
            except ServiceUnavailable as error:
                log.warning("sandbox %s does not serve, its container is removed: %s", sandbox_id, error)
                await self.destroy(sandbox_id)
            finally:
                channel.close()

        found = await self.containers.list()
        self._ends.containers = {sandbox_id: container["Id"] for sandbox_id, container in found.items()}
        running = {i: c for i, c in found.items() if c["State"] in RUNNING}
        await asyncio.gather(*(probe(i, c["State"]) for i, c in running.items()))
        await asyncio.gather(*(self._buried(i, c["Id"]) for i, c in found.items() if c["State"] not in RUNNING))

    async def _forget_runtimes(self) -> None:
        """Of other versions, as far as no sandbox has them."""
        await elsewhere.forget(self.engine, self._controller, but=self._elsewhere.volume if self._elsewhere else "")
        mounts = (mount for container in (await self.containers.list()).values() for mount in container["Mounts"])
        used = {Path(mount.get("Source", "")).name for mount in mounts}
        await asyncio.to_thread(carried.forget, self.folder, but=used | {self._carried.name})

    async def stop(self) -> None:
        if self._engine is not None:
            await asyncio.gather(*(self.destroy(sandbox_id) for sandbox_id in await self.containers.list()))
            await self.keeper.forget_all()
            await elsewhere.forget(self._engine, self._controller)
        await self.detach()

    async def detach(self) -> None:
        """Let go of the engine and its containers; their leases run on."""
        if self._elsewhere is not None:
            await self._elsewhere.close()
        if self._egress is not None:
            await self._egress.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- create and destroy --------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: SandboxSpec, owner: str) -> None:
        if spec.snapshot:
            image = await self.keeper.image(spec.snapshot)
        else:
            image = await self.images.resolve(image_of(spec, self.config))
        died = self._ends.starting[sandbox_id] = asyncio.get_running_loop().create_future()
        try:
            if self._elsewhere is not None:
                why = await self._create_elsewhere(self._elsewhere, sandbox_id, spec, owner, image, died)
            else:
                why = await self._create_here(sandbox_id, spec, owner, image, died)
            if why:
                written = await self.engine.call("logs", self._ends.containers[sandbox_id], tail=20)
                said = written.decode(errors="replace")
                raise SandboxError(f"the container did not become a sandbox: {why}; it wrote: {said}", ran=Ran.NO)
        finally:
            del self._ends.starting[sandbox_id]

    async def _create_here(
        self, sandbox_id: str, spec: SandboxSpec, owner: str, image: str, died: asyncio.Future[str]
    ) -> str:
        """Returns "" when it serves, or why it does not."""
        handoff = Handoff(self.folder, self._folder_fd, sandbox_id)
        try:
            way_out = None if self._egress is None else self.folder.resolve() / "egress"
            await self._place(sandbox_id, spec, owner, image, handed_over(self._carried, handoff.path, way_out))
            env, proxy = (environment(), f"{EGRESS}/{PROXY}") if self._egress is not None else ({}, "")
            config = {
                "workdir": spec.workdir, "ttl_s": spec.ttl_s, "env": {**env, **spec.env}, "files": dict(spec.files),
                "egress": proxy,
            }  # fmt: skip
            return await handoff.hand_over(config, died, within_s=self.config.start_timeout_s)
        finally:
            handoff.close()

    async def _create_elsewhere(
        self, way: Elsewhere, sandbox_id: str, spec: SandboxSpec, owner: str, image: str, died: asyncio.Future[str]
    ) -> str:
        start = await way.start(sandbox_id, spec, image, self.images.pull)
        await self._place(sandbox_id, spec, owner, image, start)
        channel = self.channel(sandbox_id)
        try:
            deadline = time.monotonic() + self.config.start_timeout_s
            while not died.done() and time.monotonic() < deadline:
                try:
                    await channel.request("GET", "/health", timeout_s=PROBE_S)
                except ServiceUnavailable as error:
                    log.debug("sandbox %s does not serve yet: %s", sandbox_id, error)
                    await asyncio.sleep(0.05)
                else:
                    break
            else:
                return died.result() if died.done() else f"it did not serve in {self.config.start_timeout_s:.0f} s"
            body = json.dumps({"files": dict(spec.files), "ttl_s": spec.ttl_s}).encode()
            answer = await channel.request("POST", "/prepare", body=body)
            if answer.status != 200:
                refused = from_envelope(json.loads(answer.body), f"sandboxd answered {answer.status}")
                message = f"sandboxd could not be set up: {refused}"
                raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO) from refused
            return ""
        finally:
            channel.close()

    async def _place(self, sandbox_id: str, spec: SandboxSpec, owner: str, image: str, start: Start) -> None:
        """Create the container and start it."""
        body = creation(sandbox_id, spec, self.config, image, controller=self._controller, owner=owner, start=start)
        container = self._ends.containers[sandbox_id] = await self.containers.create(sandbox_id, body, self.images.pull)
        await self.engine.call("start", container)
        if spec.snapshot:
            await self.keeper.restore(container, spec)

    async def destroy(self, sandbox_id: str) -> None:
        container = self._ends.forget(sandbox_id)
        if container is None:
            # Also what the engine created for a request whose answer never came.
            container = (await self.containers.list(sandbox_id)).get(sandbox_id, {}).get("Id")
        if container is not None:
            if not await self.containers.remove(container):
                await self.keeper.tidy()
            await self.keeper.clear()
        self._forget_files(sandbox_id)

    def _forget_files(self, sandbox_id: str) -> None:
        for suffix in ("sock", "handoff", "token"):
            (self.folder / f"{sandbox_id}.{suffix}").unlink(missing_ok=True)

    # --- what is there, what ended -------------------------------------------------------------

    async def inventory(self) -> Inventory:
        if self._elsewhere is None:
            await asyncio.gather(*map(self._settled, self._ends.containers.keys() - self._ends.starting.keys()))
        found = await self.containers.list()
        await asyncio.gather(*(self._buried(i, c["Id"]) for i, c in found.items() if c["State"] in ENDED))
        live = frozenset(i for i, c in found.items() if c["State"] not in (*ENDED, "removing"))
        live -= self._ends.causes.keys()
        paused = frozenset(i for i, c in found.items() if c["State"] == "paused" and i in live)
        return Inventory(live=live, ended=dict(self._ends.causes), paused=paused)

    async def _settled(self, sandbox_id: str) -> None:
        """When sandboxd has ended, wait a little for the engine to notice: it lists such a container as running."""
        deadline = time.monotonic() + NOTICE_S
        while sandbox_id in self._ends.containers and not listens(self._folder_fd, sandbox_id):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    async def _reconcile(self) -> None:
        """After a gap in the events: find out what ended meanwhile."""
        try:
            known = set(self._ends.containers)
            found = await self.inventory()
        except SandboxError as error:
            log.warning("what ended while the Docker Engine was away is not known yet: %s", error)
            return
        for sandbox_id in known - found.live:
            self._ends.gone(sandbox_id, "its container was removed by somebody else")
        if known - found.live:
            await self.keeper.tidy()

    def _event(self, event: Mapping[str, Any]) -> None:
        ended = self._ends.event(event)
        if ended is not None:
            self._background(self._cleared(*ended))

    async def _buried(self, sandbox_id: str, container: str) -> None:
        """Take down why a container of ours ended, then remove it."""
        if sandbox_id in self._ends.starting:
            return
        try:
            state = (await self.engine.call("inspect_container", container))["State"]
        except SandboxError as error:
            if is_absent(error):
                return
            raise
        started = state["Status"] in ENDED
        self._ends.gone(sandbox_id, state_cause(state) if started else "the controller ended while creating it")
        await self._cleared(sandbox_id, container)

    async def _cleared(self, sandbox_id: str, container: str) -> None:
        if sandbox_id in self._ends.starting:
            return
        try:
            if not await self.containers.remove(container):
                # Whoever removed it may have left its volumes.
                await self.keeper.tidy()
        except SandboxError as error:
            log.warning("the ended container of sandbox %s is not removed yet: %s", sandbox_id, error)
        self._forget_files(sandbox_id)

    # --- the rest ------------------------------------------------------------------------------

    def channel(self, sandbox_id: str) -> Channel:
        way = self._elsewhere

        async def connect() -> Stream:
            if way is not None:
                return await way.connect(f"agentrl-{sandbox_id}")
            # Reached through the descriptor, a socket's address stays short however long the folder's path is.
            return await connect_unix(f"/proc/self/fd/{self._folder_fd}/{sandbox_id}.sock")

        return Channel(sandbox_id, connect, token="" if way is None else way.token(sandbox_id))

    async def pause(self, sandbox_id: str) -> None:
        await self._turn("pause", sandbox_id, "already paused")

    async def resume(self, sandbox_id: str) -> None:
        await self._turn("unpause", sandbox_id, "not paused")

    async def _turn(self, how: str, sandbox_id: str, done: str) -> None:
        try:
            await self.engine.call(how, self._container(sandbox_id))
        except SandboxError as error:
            if done not in error.message:
                raise

    async def snapshot(self, sandbox_id: str, snapshot_id: str) -> None:
        await self.keeper.keep(self._container(sandbox_id), snapshot_id)

    async def forget_snapshot(self, snapshot_id: str) -> None:
        await self.keeper.forget(snapshot_id)

    async def snapshots(self) -> frozenset[str]:
        return await self.keeper.kept()

    def _container(self, sandbox_id: str) -> str:
        container = self._ends.containers.get(sandbox_id)
        if container is None:
            raise SandboxError(f"sandbox {sandbox_id} has no container", ran=Ran.NO)
        return container
