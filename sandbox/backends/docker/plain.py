"""A sandbox in a container without Python: what sandboxd does there, through the engine's exec API. Used by `backend`.

Slower, and without processes to follow, shells and other users, which are UNSUPPORTED. Invariants: the controller
cannot tell its channel from sandboxd's; a key runs at most once, also over a restart of the controller, since it is
written down on this machine before it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import posixpath
import tarfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentrl.core.errors import Ran, SandboxError, ServiceUnavailable, Unsupported
from sandbox.backends.docker.engine import Engine
from sandbox.backends.docker.hijack import started
from sandbox.backends.docker.running import Order, Running
from sandbox.backends.docker.scripts import PACK, READ, RENEW, UNPACK, WRITE
from sandbox.channel import Answer, Channel, Stream
from sandbox.runtime.commands import Capture
from sandbox.runtime.files import BINARY, check_digest, check_member, refused
from sandbox.runtime.sandboxd import KEPT_BYTES, KEPT_RESULTS
from sandbox.runtime.wire import MAX_BODY, Refused, decode

JSON = "application/json"
NOT_RUN = "-"
"""In the journal: the key before it did not run after all."""
SCRIPT_S = 300.0
"""Longest time for one file or folder."""
CODES = {65: (501, "UNSUPPORTED", "caller"), 67: (403, "SANDBOX_FILE", "agent"), 68: (413, "SANDBOX_FILE", "agent")}
"""What the exit codes of the file scripts mean; any other is a file that cannot be had."""


class PlainSandbox:
    """All that is known of one of them; `journal` holds the keys that were run."""

    def __init__(self, engine: Engine, container: str, journal: Path, *, workdir: str, ttl_s: float) -> None:
        self._engine, self._container, self._journal = engine, container, journal
        self._workdir, self._ttl_s = workdir, ttl_s
        self._results: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        self._digests: dict[str, str] = {}
        if journal.exists():
            lines = (line.split() for line in journal.read_text().splitlines() if line.count(" ") == 1)
            self._digests = {name: digest for name, digest in dict(lines).items() if digest != NOT_RUN}
        self._earlier = frozenset(self._digests)
        """Keys that an earlier controller wrote down, just before it ran them."""

    # --- requests ------------------------------------------------------------------------------

    async def answer(self, method: str, target: str, body: bytes, key: str) -> Answer:
        """What sandboxd would say. SandboxError when the engine does not do its part."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            return await self._route(f"{method} {url.path}", query, body, key)
        except Refused as refusal:
            return Answer(refusal.status, JSON, refusal.body)
        except Unsupported as error:
            return Answer(error.status, JSON, json.dumps(error.envelope()).encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{method} {url.path}: {type(error).__name__}: {error}"
            return Answer(400, JSON, Refused(400, "BAD_REQUEST", why).body)

    async def _route(self, route: str, query: Mapping[str, str], body: bytes, key: str) -> Answer:
        if route == "POST /exec":
            return await self._exec(key, body)
        if route == "GET /exec":
            return await self._result(query["key"])
        if route in FILES:
            return await FILES[route](self, query["path"], query, body)
        if route == "POST /prepare":
            await self.write_all(json.loads(body)["files"])
        if route in ("POST /prepare", "POST /renew"):
            await self._script(RENEW, str(int(float(json.loads(body)["ttl_s"]) * 100)))
            return Answer(200, JSON, b"{}")
        if route == "GET /health":
            state = (await self._engine.call("inspect_container", self._container))["State"]
            if not state["Running"]:
                raise SandboxError("its container does not run", ran=Ran.NO)
            running = sum(not task.done() for task in self._results.values())
            return Answer(200, JSON, json.dumps({"running": running}).encode())
        what = route.partition(" ")[2].split("/")[1]
        raise Refused(501, "UNSUPPORTED", f"{what} need a Python in the image: this sandbox has the exec API alone")

    # --- commands ------------------------------------------------------------------------------

    async def _exec(self, key: str, body: bytes) -> Answer:
        if not key:
            raise ValueError("send an idempotency key")
        name, digest = hashlib.sha256(key.encode()).hexdigest()[:32], hashlib.sha256(body).hexdigest()
        known = self._digests.get(name)
        if known is not None and known != digest:
            raise Refused(409, "CONFLICT", f"exec key {key!r} was used with another request: take a fresh key")
        if known is None:
            order = self._order(name, json.loads(body))
            self._digests[name] = digest
            self._write_down(name, digest)
            self._results[name] = asyncio.create_task(self._run(order))
            self._results[name].add_done_callback(self._trim)
        return await self._result(key)

    def _order(self, marker: str, request: dict[str, Any]) -> Order:
        argv, user = request["argv"], request.get("user", "")
        if not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("argv must be a list of strings that is not empty")
        if user:
            raise Refused(501, "UNSUPPORTED", f"cannot run as user {user!r}: that needs a Python in the image")
        return Order(
            marker=marker, argv=argv, env=request.get("env", {}), stdin=decode(request.get("stdin", "")),
            cwd=posixpath.join(self._workdir, request.get("cwd", "")), timeout_s=float(request.get("timeout_s", 30.0)),
            cap_bytes=int(request.get("cap_bytes", 1 << 20)), ttl_s=self._ttl_s,
        )  # fmt: skip

    async def _run(self, order: Order) -> Answer:
        try:
            return Answer(200, JSON, await Running(self._engine, self._container, order).result())
        except Refused as refusal:
            return Answer(refusal.status, JSON, refusal.body)
        except SandboxError as error:
            if error.ran is Ran.NO:
                # So that the key can be tried again.
                self._write_down(order.marker, NOT_RUN)
                del self._digests[order.marker], self._results[order.marker]
            raise

    def _write_down(self, name: str, digest: str) -> None:
        with self._journal.open("a") as file:
            file.write(f"{name} {digest}\n")

    async def _result(self, key: str) -> Answer:
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        task = self._results.get(name)
        if task is not None:
            return await asyncio.shield(task)
        if name in self._earlier:
            message = f"exec {key!r} may have run, but the controller that started it did not live to keep its result"
            raise Refused(410, "SANDBOX", message, "infra", "maybe")
        if name in self._digests:
            raise Refused(410, "SANDBOX", f"exec {key!r} ran, but its result is no longer kept", "infra", "yes")
        raise Refused(404, "NOT_FOUND", f"no exec with key {key!r} was received")

    def _trim(self, _: object) -> None:
        """Forget the oldest results; their keys are not forgotten."""
        done = [(name, task) for name, task in self._results.items() if task.done() and not task.cancelled()]
        sizes = [0 if task.exception() else len(task.result().body) for _, task in done]
        kept, total = len(done), sum(sizes)
        for (name, _task), size in zip(done, sizes, strict=True):
            if kept <= KEPT_RESULTS and (total <= KEPT_BYTES or kept == 1):
                return
            del self._results[name]
            kept, total = kept - 1, total - size

    async def close(self) -> None:
        for task in self._results.values():
            task.cancel()
        await asyncio.gather(*self._results.values(), return_exceptions=True)

    # --- files ---------------------------------------------------------------------------------

    async def _script(self, script: str, *args: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Exit code and both streams of one of our own."""
        out, err = Capture(-1, MAX_BODY + (1 << 20)), Capture(-1, 1 << 16)
        argv = ("sh", "-c", script, "agentrl", *args)
        async with (
            asyncio.timeout(SCRIPT_S),
            started(self._engine, self._container, argv, stdin=stdin is not None) as program,
        ):
            feeding = asyncio.create_task(program.feed(stdin or b""))
            try:
                while (piece := await program.read()) is not None:
                    (err if piece[0] == 2 else out).feed(piece[1])
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            state = await program.state()
        if state["Running"]:
            raise SandboxError("the connection to the sandbox broke off")
        if state["Pid"] == 0:
            said = out.bytes().decode(errors="replace").strip()
            raise Refused(400, "SANDBOX", f"cannot execute `sh` in the sandbox: {said}", blame="agent")
        return state["ExitCode"], out.bytes(), err.bytes()

    async def _at(self, script: str, path: str, *args: str, stdin: bytes | None = None) -> tuple[bytes, bytes]:
        """One of the scripts on a path. Refused with what it said when it fails."""
        full = posixpath.normpath(posixpath.join(self._workdir, path))
        relative = "0" if posixpath.isabs(path) else "1"
        code, out, err = await self._script(script, self._workdir, full, relative, *args, stdin=stdin)
        if code == 0:
            return out, err
        inspected = await self._engine.call("inspect_container", self._container)
        if not inspected["State"]["Running"]:
            raise SandboxError("the container ended")
        status, word, blame = CODES.get(code, (404, "SANDBOX_FILE", "agent"))
        why = err.decode(errors="replace").strip().removeprefix("agentrl: ") or f"exit code {code}"
        raise Refused(status, word, f"{path}: {why[-500:]}", blame=blame)

    async def _read(self, path: str, query: Mapping[str, str], body: bytes) -> Answer:
        offset, length = int(query.get("offset", "0")), int(query.get("length", "-1"))
        if offset < 0:
            raise ValueError("offset must not be negative")
        data, err = await self._at(READ, path, str(offset), str(length), str(MAX_BODY))
        size = err.split(b"\n")[0].decode().strip()
        return Answer(200, BINARY, data, {"x-sha256": hashlib.sha256(data).hexdigest(), "x-size": size})

    async def _write(self, path: str, query: Mapping[str, str], body: bytes) -> Answer:
        check_digest(path, body, query.get("sha256", ""))
        mode = int(query.get("mode", "420")) & 0o777
        await self._at(WRITE, path, f"{mode:o}", stdin=body)
        return Answer(200, JSON, b"{}")

    async def write_all(self, files: Mapping[str, str]) -> None:
        """The files of the spec, before anyone is served. Refused when one cannot be written."""
        for path, text in files.items():
            await self._write(path, {}, text.encode())

    async def _pack(self, path: str, query: Mapping[str, str], body: bytes) -> Answer:
        packed, _ = await self._at(PACK, path)
        if len(packed) > MAX_BODY:
            raise refused(path, f"larger than {MAX_BODY} bytes as tar", 413)
        archive = await asyncio.to_thread(_filtered, packed)
        return Answer(200, BINARY, archive, {"x-sha256": hashlib.sha256(archive).hexdigest()})

    async def _unpack(self, path: str, query: Mapping[str, str], body: bytes) -> Answer:
        check_digest(path, body, query.get("sha256", ""))
        folders = await asyncio.to_thread(_folders, path, body)
        await self._at(UNPACK, path, *folders, stdin=body)
        return Answer(200, JSON, b"{}")


FILES = {
    "GET /files": PlainSandbox._read, "PUT /files": PlainSandbox._write,
    "GET /tar": PlainSandbox._pack, "PUT /tar": PlainSandbox._unpack,
}  # fmt: skip


def _filtered(packed: bytes) -> bytes:
    """Devices and FIFOs left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(packed)) as found, tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in found:
            if member.isreg() or member.isdir() or member.issym() or member.islnk():
                archive.addfile(member, found.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _folders(path: str, body: bytes) -> list[str]:
    """Every folder that an archive's members go through. Refused for members that lead out, or are no files."""
    found: dict[str, None] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            for member in archive:
                check_member(path, member)
                name = posixpath.normpath(member.name)
                folder = name if member.isdir() else posixpath.dirname(name)
                while folder not in ("", "."):
                    found[folder] = None
                    folder = posixpath.dirname(folder)
    except tarfile.TarError as error:
        raise refused(path, f"not a tar archive: {error}", 400) from None
    return list(found)


class PlainChannel(Channel):
    """The same requests, without a sandboxd behind them."""

    def __init__(self, where: str, sandbox: PlainSandbox) -> None:
        super().__init__(where, _no_connection)
        self._sandbox = sandbox
        self._waiting: set[asyncio.Task[Answer]] = set()

    async def request(
        self, method: str, target: str, *, body: bytes = b"", key: str = "", timeout_s: float = 30.0
    ) -> Answer:
        what = f"sandbox {self._where}: no answer to {method} {target.partition('?')[0]}"
        asking = asyncio.create_task(self._sandbox.answer(method, target, body, key))
        self._waiting.add(asking)
        try:
            await asyncio.wait({asking}, timeout=timeout_s)
            if asking.cancelled() or not asking.done():
                raise ServiceUnavailable(f"{what} in {timeout_s:.0f} s, or it was interrupted")
            return asking.result()
        except (SandboxError, TimeoutError) as error:
            ran = error.ran if isinstance(error, SandboxError) else Ran.MAYBE
            raise ServiceUnavailable(f"{what}: {error}", ran=ran) from error
        finally:
            self._waiting.discard(asking)
            asking.cancel()

    def interrupt(self) -> None:
        for asking in self._waiting:
            asking.cancel()


async def _no_connection() -> Stream:
    raise OSError("there is no sandboxd to connect to")
