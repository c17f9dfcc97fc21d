"""The Docker Engine for an event loop: blocking calls in a bounded pool of threads, its errors as ours, its events.

Used by `backend`. The `docker` package is imported when an engine is opened, since it is an optional extra.
Invariant: every failure says whether the engine may have done what it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.core.errors import ConfigError, Ran, SandboxError

log = logging.getLogger(__name__)

THREADS = 16
"""Calls at once; an engine does about as many before they only queue inside it."""
CALL_S = 120.0
RECONNECT_S = 0.5

Seen = Callable[[Mapping[str, Any]], None]


def is_absent(error: SandboxError) -> bool:
    """Whether the engine said that it has no such object."""
    return error.detail.get("docker_status") == 404


def is_busy(error: SandboxError) -> bool:
    """Whether the engine refused for the state that the object is in."""
    return error.detail.get("docker_status") == 409


class Engine:
    """One engine, spoken to from any thread. `close` must be called."""

    def __init__(self, host: str) -> None:
        try:
            import docker
        except ImportError:
            raise ConfigError("sandbox.backend = 'docker' needs the extra: pip install 'agentrl[docker]'") from None
        self._errors = docker.errors
        options = {"base_url": host} if host else docker.utils.kwargs_from_env()
        self.host = options.get("base_url") or "unix:///var/run/docker.sock"
        self.tls = "tls" in options
        self.version = ""
        """Of the engine's API."""
        self._open: Callable[..., Any] = functools.partial(docker.APIClient, **options, max_pool_size=THREADS)
        try:
            self._knock()
            self._client = self._open(timeout=CALL_S)
            self.version = self._client.api_version
        except (docker.errors.DockerException, OSError) as error:
            raise ConfigError(f"no Docker Engine answers at {self.host}: {error}") from error
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._stopping = threading.Event()
        self._stream: Any = None
        self._watching: threading.Thread | None = None

    async def call(self, method: str, *args: Any, ran: Ran = Ran.MAYBE, **kwargs: Any) -> Any:
        """One method of `docker.APIClient`; `ran` is what a failure says when the engine may have acted."""
        work = functools.partial(self._call, method, args, kwargs, ran)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def stream(self, method: str, each: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        """As `call`, for methods that return pieces: `each` gets them in a thread. Returns what comes beside them."""
        work = functools.partial(self._consume, method, each, args, kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _consume(
        self, method: str, each: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        found = self._call(method, args, kwargs, Ran.MAYBE)
        pieces, beside = found if isinstance(found, tuple) else (found, None)
        try:
            for piece in pieces:
                each(piece)
        except (self._errors.DockerException, OSError) as error:
            raise SandboxError(f"the Docker Engine at {self.host} broke off {method}: {error}") from error
        return beside

    def _knock(self) -> None:
        """OSError when the engine's socket takes no connection: the package would leave its own socket open then."""
        if self.host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(self.host.removeprefix("unix://"))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ran: Ran) -> Any:
        try:
            self._knock()
            return getattr(self._client, method)(*args, **kwargs)
        except self._errors.APIError as error:
            status = error.status_code
            raise SandboxError(
                f"Docker, {method}: {error.explanation}",
                ran=Ran.NO if status in (404, 409) else ran,
                detail={"docker_status": status},
            ) from error
        except (self._errors.DockerException, OSError) as error:
            raise SandboxError(
                f"the Docker Engine at {self.host} does not answer to {method}: {error}", ran=ran, retryable=True
            ) from error

    # --- events --------------------------------------------------------------------------------

    def watch(self, filters: Mapping[str, Any], seen: Seen, connected: Callable[[], None]) -> None:
        """Call `seen` with each event, and `connected` after every connection, in the running loop."""
        loop = asyncio.get_running_loop()

        def post(call: Callable[..., None], *args: Any) -> None:
            if not self._stopping.is_set():
                loop.call_soon_threadsafe(call, *args)

        def follow() -> None:
            while not self._stopping.wait(RECONNECT_S if self._stream else 0.0):
                try:
                    self._follow(filters, lambda event: post(seen, event), lambda: post(connected))
                except (self._errors.DockerException, OSError) as error:
                    log.warning("the events of the Docker Engine broke off: %s", error)

        self._watching = threading.Thread(target=follow, name="docker-events", daemon=True)
        self._watching.start()

    def _follow(self, filters: Mapping[str, Any], seen: Seen, connected: Callable[[], None]) -> None:
        self._knock()
        with contextlib.closing(self._open(timeout=None, version=self._client.api_version)) as client:
            self._stream = client.events(decode=True, filters=dict(filters))
            if self._stopping.is_set():
                return
            connected()
            for event in self._stream:
                seen(event)

    async def close(self) -> None:
        self._stopping.set()
        if self._watching is not None:
            if self._stream is not None:
                # Its socket is gone already when the engine is; else this is what wakes the thread.
                with contextlib.suppress(AttributeError, OSError):
                    self._stream.close()
            await asyncio.to_thread(self._watching.join, 10.0)
        await asyncio.to_thread(self._threads.shutdown)
        self._client.close()
