"""A small Kubernetes API server in this process, for what a healthy one won't show. Used by the backend's tests.

Lists with pages, watches with history, bookmarks and 410, label selectors, merge patches, conflicts, graceful and
forced deletion, exec of what carries bytes to sandboxd. Faults are switched on by attributes. Invariant: every change
has a version of its own, and a watch from a version sees each later change once.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from sandbox.backends.kubernetes.manifests import PORT
from sandbox.runtime.carry import READY

Object = dict[str, Any]
Key = tuple[str, str]
"""Kind of objects, as in URLs, and name."""
PATH = re.compile(r"^/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/(?P<ns>[^/]+)/(?P<what>[^/]+)(?:/(?P<name>[^/]+))?$")
EXEC = re.compile(r"^/api/v1/namespaces/[^/]+/pods/(?P<name>[^/]+)/exec$")


class FakeKube:
    """One namespace. `created` and `deleting` are where a kubelet listens."""

    def __init__(self, *, history: int = 1000, bookmark_s: float = 0.05) -> None:
        self.objects: dict[Key, Object] = {}
        self.requests: list[str] = []
        """Method and path of each, in their order."""
        self.list_s = 0.0
        """Seconds that a list takes after its snapshot was taken."""
        self.away = False
        """Every request is answered with 503, as by a proxy whose server is gone."""
        self.refusals: list[tuple[str, int, Object]] = []
        """Method, status and body of what the next requests with that method are answered instead."""
        self.exec_protocols = ("v5.channel.k8s.io", "v4.channel.k8s.io")
        """Of an exec's websocket, as far as this server is new."""
        self.watches = 0
        """Streams that are open now."""
        self.created: Callable[[Object], None] = lambda pod: None
        self.deleting: Callable[[Object], None] = lambda pod: self.remove(pod["metadata"]["name"])
        self._history, self._bookmark_s = history, bookmark_s
        self._version = 0
        self._compacted = 0
        self._log: list[tuple[int, str, Key, Object]] = []
        self._changed = asyncio.Event()
        self._drop = asyncio.Event()

    # --- what tests and the kubelet do ---------------------------------------------------------

    def pod(self, name: str) -> Object:
        return self.objects["pods", name]

    def update(self, name: str, status: Object) -> None:
        """Set fields of a pod's status."""
        self.pod(name).setdefault("status", {}).update(status)
        self._emit("MODIFIED", ("pods", name))

    def remove(self, name: str, what: str = "pods") -> None:
        """What a node's confirmation of a deletion does."""
        if (what, name) in self.objects:
            self._emit("DELETED", (what, name))
            del self.objects[what, name]

    def compact(self) -> None:
        """Forget the history: a watch from any earlier version gets 410."""
        self._log.clear()
        self._version += 1
        self._compacted = self._version

    def drop_watches(self) -> None:
        """Cut every open stream, as a load balancer does."""
        self._drop.set()
        self._drop = asyncio.Event()

    def _emit(self, kind: str, key: Key) -> None:
        self._version += 1
        found = self.objects[key]
        found["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, kind, key, copy.deepcopy(found)))
        while len(self._log) > self._history:
            self._compacted = self._log.pop(0)[0]
        self._changed.set()
        self._changed = asyncio.Event()

    # --- HTTP ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """Serve on a free port; gives the path of a kubeconfig."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        try:
            yield kubeconfig
        finally:
            self.drop_watches()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if carrier := EXEC.match(request.path):
            return await self._exec(request, carrier["name"])
        found = PATH.match(request.path)
        if found is None:
            return refusal(404, "NotFound", request.path)
        what, name = found["what"], found["name"]
        self.requests.append(f"{request.method} {request.path}")
        if self.away:
            return refusal(503, "ServiceUnavailable", "no server")
        for position, (method, status, body) in enumerate(self.refusals):
            if method == request.method:
                del self.refusals[position]
                return web.json_response(body, status=status)
        if request.method == "GET" and not name:
            return await (self._watch(request, what) if request.query.get("watch") else self._list(request, what))
        if request.method == "POST":
            return self._create(what, await request.json())
        key = (what, name)
        if key not in self.objects:
            return refusal(404, "NotFound", f"{what} {name}")
        if request.method == "DELETE":
            return self._delete(request, key)
        if request.method == "PATCH":
            merge(self.objects[key], json.loads(await request.text()))
            self._emit("MODIFIED", key)
        return web.json_response(self.objects[key])

    async def _exec(self, request: web.Request, name: str) -> web.StreamResponse:
        self.requests.append(f"EXEC {name}")
        if ("pods", name) not in self.objects:
            return refusal(404, "NotFound", name)
        stream = web.WebSocketResponse(protocols=self.exec_protocols)
        await stream.prepare(request)
        reader, writer = await asyncio.open_connection(self.pod(name)["status"]["podIP"], PORT)

        async def outward() -> None:
            await stream.send_bytes(b"\x01" + READY)
            while data := await reader.read(1 << 16):
                await stream.send_bytes(b"\x01" + data)

        carrying = asyncio.create_task(outward())
        async for message in stream:
            assert message.data[0] == 0
            writer.write(message.data[1:])
        carrying.cancel()
        await asyncio.wait({carrying})
        writer.close()
        return stream

    def _create(self, what: str, made: Object) -> web.Response:
        name = made["metadata"]["name"]
        if (what, name) in self.objects:
            return refusal(409, "AlreadyExists", f"{what} {name}")
        made["metadata"]["uid"] = str(uuid.uuid4())
        if what == "pods":
            made["status"] = {"phase": "Pending"}
        self.objects[what, name] = made
        self._emit("ADDED", (what, name))
        answer = web.json_response(made, status=201)
        if what == "pods":
            self.created(made)
        return answer

    def _delete(self, request: web.Request, key: Key) -> web.Response:
        found = self.objects[key]
        if key[0] != "pods" or request.query.get("gracePeriodSeconds") == "0":
            self.remove(key[1], key[0])
        elif "deletionTimestamp" not in found["metadata"]:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._emit("MODIFIED", key)
            asyncio.get_running_loop().call_soon(self.deleting, found)
        return web.json_response(found)

    async def _list(self, request: web.Request, what: str) -> web.Response:
        names = sorted(name for kind, name in self.objects if kind == what)
        items = [copy.deepcopy(self.objects[what, name]) for name in names]
        items = [item for item in items if selected(item, request.query.get("labelSelector", ""))]
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 1 << 30))
        meta = {"resourceVersion": str(self._version)}
        if start + limit < len(items):
            meta["continue"] = str(start + limit)
        await asyncio.sleep(self.list_s)
        return web.json_response({"kind": "List", "metadata": meta, "items": items[start : start + limit]})

    async def _watch(self, request: web.Request, what: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        stream = web.StreamResponse(headers={"content-type": "application/json"})
        await stream.prepare(request)
        dropped = asyncio.create_task(self._drop.wait())
        self.watches += 1
        try:
            await self._stream(stream, what, request.query, version, dropped)
        except ConnectionError:
            return stream  # The client left, as watchers do.
        finally:
            self.watches -= 1
            dropped.cancel()
        if dropped.done() and request.transport is not None:
            request.transport.abort()
        return stream

    async def _stream(
        self, stream: web.StreamResponse, what: str, query: Mapping[str, str], version: int, dropped: asyncio.Task[bool]
    ) -> None:
        """Send events until the version is compacted or the watch is dropped."""
        while not dropped.done():
            if version < self._compacted:
                await stream.write(event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
                return
            changed = self._changed
            for number, kind, key, found in [entry for entry in self._log if entry[0] > version]:
                version = number
                if key[0] == what and selected(found, query.get("labelSelector", "")):
                    await stream.write(event(kind, found))
            waiter = asyncio.create_task(changed.wait())
            await asyncio.wait({waiter, dropped}, timeout=self._bookmark_s, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            quiet = not changed.is_set() and version >= self._compacted
            if quiet and query.get("allowWatchBookmarks") == "true":
                version = self._version
                await stream.write(event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}}))


def event(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def refusal(status: int, reason: str, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": status, "reason": reason, "message": message}, status=status)


def selected(found: Object, selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, _, value in (t.partition("=") for t in selector.split(",") if t))


def merge(base: Object, over: Object) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        elif value is None:
            base.pop(key, None)
        else:
            base[key] = value
