"""Snapshots: the files of a sandbox as an image of the engine, and what lies in its volumes as archives beside it. Used
by `backend`.

Invariants: files are taken while the sandbox is frozen; what is kept carries our label and is gone after `forget`.
"""

from __future__ import annotations

import asyncio
import io
import logging
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from agentrl.core.errors import Blame, Ran, SandboxError, Unsupported
from agentrl.core.types import SandboxSpec
from sandbox.backends.docker.container import CONTROLLER, REPOSITORY, SANDBOX, SNAPSHOT, volumes
from sandbox.backends.docker.engine import Engine, is_absent

log = logging.getLogger(__name__)

FRESH_S = 0.003
"""A volume whose folder changed this short before its sandbox was frozen, or later, is another than the sandbox's."""


class Keeper:
    def __init__(self, engine: Engine, folder: Path, controller: str) -> None:
        self._engine, self._folder, self._controller = engine, folder, controller
        self._labels = [f"{CONTROLLER}={controller}", SNAPSHOT]
        self._lingering = True
        """Whether an image may be left that only sandboxes hold."""

    async def keep(self, container: str, snapshot_id: str) -> None:
        state = await self._engine.call("inspect_container", container)
        paused = state["State"]["Paused"]
        if not paused:
            await self._engine.call("pause", container)
        try:
            await self._keep(container, snapshot_id, state)
        finally:
            if not paused:
                await self._engine.call("unpause", container)

    async def _keep(self, container: str, snapshot_id: str, state: Any) -> None:
        now = _time((await self._engine.call("info"))["SystemTime"])
        # What is made from it by hand is not the sandbox that it was.
        said = ((CONTROLLER, self._controller), (SNAPSHOT, snapshot_id), (SANDBOX, '""'))
        labels = " ".join(f"{key}={value}" for key, value in said)
        commit: dict[str, Any] = {
            "repository": REPOSITORY,
            "tag": snapshot_id,
            "changes": f"LABEL {labels}",
            "pause": False,
        }
        await self._engine.call("commit", container, **commit)
        for target in (mount["Destination"] for mount in state["Mounts"] if mount["Type"] == "volume" and mount["RW"]):
            with self._archive(snapshot_id, target).open("wb") as file:
                found = await self._engine.stream("get_archive", file.write, container, target)
            if _time(found["mtime"]) > now - FRESH_S:
                raise Unsupported(
                    f"the engine was restarted since, and has lost its own way to {target} of the sandbox"
                )

    async def image(self, snapshot_id: str) -> str:
        """The image of a snapshot."""
        name = f"{REPOSITORY}:{snapshot_id}"
        try:
            await self._engine.call("inspect_image", name)
        except SandboxError as error:
            if not is_absent(error):
                raise
            raise SandboxError(f"there is no snapshot {snapshot_id!r}", blame=Blame.CALLER, ran=Ran.NO) from error
        return name

    async def restore(self, container: str, spec: SandboxSpec) -> None:
        """Put what was in its volumes into those of a new one."""
        for path in self._archives(spec.snapshot):
            target = unquote(path.name.split(".")[1])
            if target not in volumes(spec):
                message = f"snapshot {spec.snapshot} has files in {target}, which is not the workdir of the spec"
                raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)
            data = await asyncio.to_thread(_below, path)
            await self._engine.call("put_archive", container, target, data)

    async def forget(self, snapshot_id: str) -> None:
        try:
            # By force, since sandboxes that were made from it go on; with the last of them goes the image.
            await self._engine.call("remove_image", f"{REPOSITORY}:{snapshot_id}", force=True)
        except SandboxError as error:
            if not is_absent(error):
                raise
        self._lingering = True
        await self.clear()
        for path in self._archives(snapshot_id):
            path.unlink(missing_ok=True)

    async def kept(self) -> frozenset[str]:
        """Ids of the snapshots that the engine has, forgotten ones that sandboxes still use left out."""
        images = await self._engine.call("images", filters={"label": self._labels})
        return frozenset(image["Labels"][SNAPSHOT] for image in images if image["RepoTags"])

    async def clear(self) -> None:
        """Remove images of snapshots that were forgotten, as far as nobody uses them any more."""
        if self._lingering:
            await self._engine.call("prune_images", {"dangling": True, "label": self._labels})
            self._lingering = bool(await self._engine.call("images", filters={"dangling": True, "label": self._labels}))

    async def tidy(self) -> None:
        """Remove what is left of ours: an engine with live-restore keeps the empty volumes of what survived its end."""
        try:
            # One by one, since a prune spares volumes with options.
            found = await self._engine.call("volumes", {"dangling": True, "label": self._labels[:1]})
            for volume in found["Volumes"] or ():
                await self._engine.call("remove_volume", volume["Name"])
            await self.clear()
        except SandboxError as error:
            log.warning("what is left of earlier sandboxes was not removed: %s", error)

    async def forget_all(self) -> None:
        """Everything with our label."""
        for image in await self._engine.call("images", filters={"label": self._labels}):
            await self.forget(image["Labels"][SNAPSHOT])

    def _archive(self, snapshot_id: str, target: str) -> Path:
        return self._folder / f"{snapshot_id}.{quote(target, safe='').replace('.', '%2E')}.tar"

    def _archives(self, snapshot_id: str) -> list[Path]:
        return sorted(self._folder.glob(f"{snapshot_id}.*.tar"))


def _below(path: Path) -> bytes:
    """An archive of a folder, as one of what is in it."""
    buffer = io.BytesIO()
    with tarfile.open(path) as found, tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in found:
            content = found.extractfile(member) if member.isreg() else None
            member.name = f"./{member.name.partition('/')[2]}"
            if member.islnk():
                member.linkname = f"./{member.linkname.partition('/')[2]}"
            archive.addfile(member, content)
    return buffer.getvalue()


def _time(text: str) -> float:
    """Seconds of what the engine writes with nanoseconds."""
    head, _, zone = text.replace("Z", "+00:00").partition("+")
    seconds, _, fraction = head.partition(".")
    return datetime.fromisoformat(f"{seconds}+{zone or '00:00'}").timestamp() + float(f"0.{fraction or 0}")
