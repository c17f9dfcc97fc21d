"""One namespace of a Kubernetes cluster, spoken to in plain JSON. Used by `backend` and `watch`.

The library brings the credentials and the connections; its typed models cost ten times the JSON on a list of
thousands of pods. Invariant: whatever goes wrong comes out as an error of agentrl.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from agentrl.core.errors import (
    AgentRLError,
    Blame,
    CapacityError,
    ConfigError,
    Ran,
    SandboxError,
    ServiceUnavailable,
)

Object = dict[str, Any]
"""A Kubernetes object, or a Status, as the API has it."""

REQUEST_S = 30.0
PAGE = 500
"""Objects asked for at once by a list."""
GONE = 410
"""The version to go on from is compacted: list again."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: Object


class Cluster:
    """Requests to one namespace. Make it with `connect`, end it with `close`."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    async def connect(cls, *, kubeconfig: str, context: str, namespace: str) -> Cluster:
        """By a kubeconfig, or, when that is empty and we run in a pod, by the pod's service account."""
        try:
            from kubernetes.aio import client as api
            from kubernetes.aio import config
        except ImportError as error:
            raise ConfigError("sandbox.backend = 'kubernetes' needs: pip install 'agentrl[kubernetes]'") from error
        settings = api.Configuration()
        try:
            if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=settings)
            else:
                where = os.path.expanduser(kubeconfig) if kubeconfig else None
                await config.load_kube_config(
                    where, context=context or None, client_configuration=settings, persist_config=False
                )
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"sandbox.kubernetes.kubeconfig = {kubeconfig!r} cannot be used: {error}") from error
        # A watch and every create wait on connections of their own.
        settings.connection_pool_maxsize = 64
        settings.retries = None
        return cls(api.ApiClient(settings), namespace)

    async def close(self) -> None:
        await self._client.close()
        # Connections that were aborted end in the loop's next turn.
        await asyncio.sleep(0)

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, query: Iterable[tuple[str, str]], body: Object | None, kind: str, seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, its body unread."""
        what = f"Kubernetes, {method} {path.partition('?')[0]}"
        ran = Ran.NO if method == "GET" else Ran.MAYBE
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)
        try:
            method, url, headers, body, _ = await self._client.param_serialize(
                method, path, query_params=list(query), header_params={"Content-Type": kind}, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServiceUnavailable(f"{what}: {type(error).__name__}: {error}", ran=ran) from error
        response: aiohttp.ClientResponse = answer.response
        try:
            yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServiceUnavailable(f"{what}: {type(error).__name__}: {error}", ran=ran) from error
        finally:
            # Unread to its end, e.g. a watch: closed gently, TLS would wait for the server's word.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def call(
        self,
        method: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        allow: tuple[int, ...] = (),
        group: str = "",
    ) -> Reply:
        """One request about `what`, e.g. `pods/NAME`. A status outside 2xx that is not in `allow` raises."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        path = self.path(what, group)
        async with self._sent(method, path, (query or {}).items(), body, kind, REQUEST_S) as response:
            raw = await response.read()
            # To the end: only then may the connection be used again.
            response.release()
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            found = {"message": raw[:500].decode(errors="replace")}
        if response.status >= 300 and response.status not in allow:
            raise _error(response.status, found, f"{method} {path}")
        return Reply(response.status, found)

    async def websocket(
        self, what: str, query: Iterable[tuple[str, str]], protocols: Iterable[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """A connection of messages, e.g. `pods/NAME/exec`, in the first of the protocols that the server speaks."""
        path = self.path(what)
        _, url, headers, _, _ = await self._client.param_serialize(
            "GET", path, query_params=list(query), header_params={}, auth_settings=["BearerToken"]
        )
        rest = self._client.rest_client
        timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
        try:
            made: aiohttp.ClientWebSocketResponse = await rest.pool_manager.ws_connect(
                url, headers=headers, protocols=tuple(protocols), timeout=timeout, proxy=rest.proxy, max_msg_size=0
            )
        except aiohttp.WSServerHandshakeError as error:
            raise _error(error.status, {"message": error.message}, f"GET {path}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServiceUnavailable(f"Kubernetes, GET {path}: {type(error).__name__}: {error}", ran=Ran.NO) from error
        return made

    def path(self, what: str, group: str = "") -> str:
        return f"{f'/apis/{group}' if group else '/api/v1'}/namespaces/{self.namespace}/{what}"

    async def list(self, what: str, selector: str) -> tuple[list[Object], str]:
        """All objects of a kind with these labels as they are now, and the version to watch from."""
        items: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            reply = await self.call("GET", what, query=query, allow=(GONE,))
            if reply.status == GONE:
                # The list took longer than the server keeps its snapshot: begin anew.
                items, query = [], {"labelSelector": selector}
                continue
            items += reply.body["items"]
            meta = reply.body["metadata"]
            if not meta.get("continue"):
                return items, meta["resourceVersion"]
            query = {**query, "continue": meta["continue"]}

    async def watch(self, what: str, selector: str, version: str, *, seconds: int) -> AsyncIterator[Object]:
        """Events since a version, until the server ends the stream or it breaks."""
        query = {
            "watch": "true", "labelSelector": selector, "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }  # fmt: skip
        path = self.path(what)
        async with self._sent("GET", path, query.items(), None, "application/json", seconds + 30.0) as response:
            if response.status >= 300:
                raw = await response.read()
                if response.status == GONE:
                    yield {"type": "ERROR", "object": {"code": GONE}}
                    return
                raise _error(response.status, {"message": raw[:500].decode(errors="replace")}, f"WATCH {path}")
            buffer = bytearray()
            async for chunk in response.content.iter_any():
                buffer += chunk
                *lines, rest = buffer.split(b"\n")
                buffer = rest
                for line in lines:
                    yield orjson.loads(line)


def _error(status: int, body: Object, what: str) -> AgentRLError:
    message = f"Kubernetes, {what}: {status} {body.get('reason', '')}: {body.get('message', '')}"
    if status == 403 and "exceeded quota" in message:
        return CapacityError(message, detail={"retry_after_s": 5.0})
    if status == 429:
        return ServiceUnavailable(message, ran=Ran.NO)
    if status >= 500:
        return ServiceUnavailable(message)
    if status in (400, 422):
        return SandboxError(message, blame=Blame.CALLER, ran=Ran.NO)
    return SandboxError(message, ran=Ran.NO)


async def pause_between_tries(attempt: int) -> None:
    """Longer with every failure: 0.1 s up to 10 s."""
    await asyncio.sleep(min(10.0, 0.1 * 2**attempt))
