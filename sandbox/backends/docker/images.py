"""The images of sandboxes: whether the engine has them, and how it gets them. Used by `backend`.

Invariant: an image that cannot be had is an error that says what was tried.
"""

from __future__ import annotations

import logging

from agentrl.core.config import DockerConfig
from agentrl.core.errors import Blame, Ran, SandboxError
from sandbox.backends.docker.engine import Engine

log = logging.getLogger(__name__)


class Images:
    def __init__(self, engine: Engine, config: DockerConfig) -> None:
        self._engine, self._config = engine, config
        self.plain: set[str] = set()
        """Names of those that were found to have no Python."""

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

    async def prefetch(self, image: str) -> None:
        try:
            await self._engine.call("inspect_image", image)
        except SandboxError:
            try:
                await self.pull(image)
            except SandboxError as error:
                log.error("prefetch: %s", error)
