"""The images of sandboxes: pulled, or built from a folder. Used by `backend`.

Invariants: a folder is built once for each content, whoever asks at the same time; an image that cannot be had is an
error that says what was tried.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
from collections import deque
from pathlib import Path
from typing import Any

from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, ConfigError, Ran, SandboxError
from sandbox.backends.docker.engine import Engine, is_absent

log = logging.getLogger(__name__)

BUILD = "agentrl.build"
"""Label: the name of the build."""
BUILD_S = 3600
SAID_LINES = 20
"""How much of a failed build's output is in its error."""


class Images:
    def __init__(self, engine: Engine, config: DockerConfig) -> None:
        self._engine, self._config = engine, config
        self._building: dict[str, asyncio.Lock] = {}
        for name, folder in config.builds.items():
            if not (Path(folder) / "Dockerfile").is_file():
                raise ConfigError(f"sandbox.docker.builds.{name} = {folder!r}: there is no file {folder}/Dockerfile")

    async def resolve(self, image: str) -> str:
        """What the engine knows an image by, built where it is one of ours to build."""
        if image not in self._config.builds:
            return image
        async with self._building.setdefault(image, asyncio.Lock()):
            folder = Path(self._config.builds[image])
            tag = f"agentrl-build-{image.lower()}:{await asyncio.to_thread(_digest, folder)}"
            if not await self._has(tag):
                await self._build(image, folder, tag)
        return tag

    async def _has(self, image: str) -> bool:
        try:
            await self._engine.call("inspect_image", image)
        except SandboxError as error:
            if is_absent(error):
                return False
            raise
        return True

    async def _build(self, name: str, folder: Path, tag: str) -> None:
        log.info("building image %s from %s", tag, folder)
        said: deque[str] = deque(maxlen=SAID_LINES)

        failed = ""

        def line(message: dict[str, Any]) -> None:
            nonlocal failed
            failed = str(message.get("error", failed))
            text = str(message.get("error") or message.get("stream") or message.get("status") or "").strip()
            if text:
                said.append(text)
                log.info("build of %s: %s", name, text)

        options = {"path": str(folder), "tag": tag, "rm": True, "forcerm": True, "decode": True}
        await self._engine.stream("build", line, **options, labels={BUILD: name}, timeout=BUILD_S)
        if failed:
            lines = "\n".join(said)
            message = f"sandbox.docker.builds.{name}: the build of {folder} failed: {failed}; its last lines:\n{lines}"
            raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)

    async def pull(self, image: str) -> None:
        if self._config.pull == "never":
            message = f"the Docker Engine has no image {image!r}, and sandbox.docker.pull is 'never'"
            raise SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)
        repository, colon, tag = image.rpartition(":")
        if not colon or "/" in tag or "@" in image:
            repository, tag = image, "" if "@" in image else "latest"
        try:
            await self._engine.call("pull", repository, tag=tag or None, ran=Ran.NO)
        except SandboxError as error:
            raise SandboxError(f"image {image!r} is not there and cannot be pulled: {error}", ran=Ran.NO) from error

    async def prefetch(self) -> None:
        """Build and pull what the configuration names, one after another; what fails is tried again when it is used."""
        for image in dict.fromkeys([*self._config.builds, *self._config.prefetch]):
            try:
                found = await self.resolve(image)
                if not await self._has(found):
                    await self.pull(found)
            except SandboxError as error:
                log.error("prefetch: %s", error)


def _digest(folder: Path) -> str:
    """Of all that a build of the folder sees: names, modes and contents."""
    from docker.utils.build import exclude_paths  # the optional extra

    ignore = folder / ".dockerignore"
    patterns = [line.strip() for line in ignore.read_text().splitlines()] if ignore.exists() else []
    patterns = [line for line in patterns if line and not line.startswith("#")]
    total = hashlib.sha256()
    for name in sorted(exclude_paths(str(folder), patterns, dockerfile="Dockerfile")):
        path = folder / name
        mode = path.lstat().st_mode
        total.update(f"{name}\0{stat.S_IFMT(mode) | mode & 0o111}\0".encode())
        if stat.S_ISLNK(mode):
            total.update(os.readlink(path).encode())
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:24]
