"""The runtime inside a sandbox: commands, files, health and the lease, over HTTP on a unix socket or a port.

Started by a backend as the sandbox's first process; called only by the controller. One thread, standard library
only, Python 3.7+, since it runs in other people's images (as `python -m sandbox.runtime.sandboxd CONFIG_JSON`).
Invariants: a key runs at most once, and without renewal for TTL + grace everything here dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import signal
import socket
import stat
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit

from sandbox.runtime.commands import Command
from sandbox.runtime.processes import (
    MARKER,
    descendants,
    kill_all,
    marker_of,
    oom_kills,
    processes,
    set_subreaper,
    spawn,
)
from sandbox.runtime.wire import MAX_BODY, Connection, Refused

GRACE_S = 5.0
"""Seconds after the lease's end until the sandbox ends itself; the controller closes it before."""
KEPT_RESULTS, KEPT_BYTES = 512, 8 << 20
"""How many answers stay for replay, and their bytes; older ones are forgotten, their keys are not."""
LEASE_ENDED = 3
"""Exit code when the lease ended."""


class Config:
    """What a backend tells the sandbox at its start."""

    def __init__(
        self,
        workdir: str,
        ttl_s: float,
        env: dict[str, str],
        home: str = "",
        scratch: str = "",
        token: str = "",
    ) -> None:
        self.workdir = workdir
        self.ttl_s = ttl_s
        self.env = env
        self.home = home or workdir
        """Where `workdir` really is; elsewhere only when the backend could not mount it."""
        self.scratch = scratch
        """Where /tmp really is, then; empty when everything is where it seems."""
        self.token = token
        """Bearer token of the TCP server."""


class Daemon:
    """The event loop and the routes. SIGCHLD must have a handler (`main`, or the fork server's): it wakes the loop."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self.config = config
        self.running: dict[int, Command] = {}
        self._by_key: OrderedDict[str, Command] = OrderedDict()
        self._forgotten: dict[str, None] = {}
        self._kept = 0
        """Bytes of the answers in `_by_key`."""
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._ooms = oom_kills()
        self._roots = [os.path.realpath(config.home), os.path.realpath(config.scratch or config.home)]
        self._oom_score = self._open_oom_score()
        self.renew(config.ttl_s)
        set_subreaper()
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        listener.setblocking(False)
        self.watch(self._wake, selectors.EVENT_READ, self._reap)
        self.watch(listener.fileno(), selectors.EVENT_READ, self._accept)

    # --- the loop ------------------------------------------------------------------------------

    def watch(self, fd: int, events: int, call: Callable[[], Any]) -> None:
        try:
            self._selector.modify(fd, events, call)
        except KeyError:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def serve(self) -> NoReturn:
        while True:
            now = time.monotonic()
            # A running command holds the lease until its own deadline.
            if now > GRACE_S + max([self._lease, *(c.deadline for c in self.running.values())]):
                self.exit(LEASE_ENDED)
            for command in [c for c in self.running.values() if c.deadline <= now]:
                command.expire()
            wake = min([self._lease + GRACE_S, *(c.deadline for c in self.running.values())])
            for key, _ in self._selector.select(max(0.0, wake - time.monotonic()) + 0.001):
                # A call before this one may have closed the descriptor, and another may have its number by now.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()

    def exit(self, code: int) -> NoReturn:
        """End with everything below us; as a namespace's init, the kernel does the same once more."""
        me = os.getpid()
        kill_all(lambda: descendants({me}, processes()) - {me})
        os._exit(code)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Connection(self, sock)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 512)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.running.get(pid)
            if command is not None:
                command.exited(status)

    # --- requests ------------------------------------------------------------------------------

    def handle(self, connection: Connection, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            if self.config.token:
                given = headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {self.config.token}".encode()):
                    raise Refused(401, "UNAUTHORIZED", "sandboxd: wrong or missing token")
            self._route(connection, f"{method} {url.path}", query, headers, body)
        except Refused as refusal:
            connection.reply(refusal.status, refusal.body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{method} {url.path}: {type(error).__name__}: {error}"
            connection.reply(400, Refused(400, "BAD_REQUEST", f"sandboxd: {why}").body)

    def _route(
        self, connection: Connection, route: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        if route == "POST /exec":
            self._exec(connection, headers["idempotency-key"], body)
        elif route == "GET /exec":
            self._result(connection, query["key"])
        elif route == "GET /files":
            connection.reply(200, self._read_file(query["path"]), "application/octet-stream")
        elif route == "PUT /files":
            self._write_file(query["path"], body, int(query.get("mode", "420")))
            connection.reply(200, b"{}")
        elif route == "POST /renew":
            self.renew(float(json.loads(body)["ttl_s"]))
            connection.reply(200, b"{}")
        elif route == "GET /health":
            left = self._lease - time.monotonic()
            connection.reply(200, json.dumps({"running": len(self.running), "lease_s": left}).encode())
        else:
            raise Refused(404, "NOT_FOUND", f"sandboxd has no route {route}")

    def renew(self, ttl_s: float) -> None:
        self._lease = time.monotonic() + ttl_s

    def _extend(self) -> None:
        self._lease = max(self._lease, time.monotonic() + self.config.ttl_s)

    # --- commands ------------------------------------------------------------------------------

    def _exec(self, connection: Connection, key: str, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()
        known = self._by_key.get(key)
        if known is None:
            if key in self._forgotten:
                self._result(connection, key)
            request = json.loads(body)
            known = self._start(key, digest, request)
            self._extend()
        elif known.digest != digest:
            raise Refused(409, "CONFLICT", f"exec key {key!r} was used with another request: take a fresh key")
        self._await(connection, known)

    def _start(self, key: str, digest: str, request: dict[str, Any]) -> Command:
        try:
            command = Command(self, key, digest, request)
        except OSError as error:
            # EAGAIN is the process limit: what this sandbox may use, so still the agent's doing.
            message = f"cannot execute {request.get('argv', ['?'])[0]!r}: {error.strerror}"
            raise Refused(400, "SANDBOX", message, blame="agent") from None
        self._by_key[key] = self.running[command.pid] = command
        return command

    def _result(self, connection: Connection, key: str) -> None:
        command = self._by_key.get(key)
        if command is not None:
            self._await(connection, command)
        elif key in self._forgotten:
            raise Refused(410, "SANDBOX", f"exec {key!r} ran, but its result is no longer kept", "infra", "yes")
        else:
            raise Refused(404, "NOT_FOUND", f"no exec with key {key!r} was received")

    def _await(self, connection: Connection, command: Command) -> None:
        if command.answer:
            connection.reply(200, command.answer)
        else:
            connection.waiting_for = command
            command.waiters.append(connection)

    def finished(self, command: Command) -> None:
        del self.running[command.pid]
        self._extend()
        waiters, command.waiters = command.waiters, []
        for connection in waiters:
            connection.reply(200, command.answer)
        self._kept += len(command.answer)
        # A command that runs for long holds up nobody: the oldest answers behind it go.
        for key, old in list(self._by_key.items()):
            if old is command or (len(self._by_key) <= KEPT_RESULTS and self._kept <= KEPT_BYTES):
                return
            if old.answer:
                self._kept -= len(old.answer)
                del self._by_key[key]
                self._forgotten[key] = None

    def spawn(self, request: dict[str, Any], key: str, stdio: tuple[int, int, int]) -> int:
        argv = request["argv"]
        if not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("argv must be a list of strings that is not empty")
        env = {**self.config.env, **request.get("env", {}), MARKER: key}
        # A child inherits the score at its birth: this way the kernel's OOM killer takes commands before us,
        # and lowering ours again to what it was needs no privilege.
        self._set_oom_score(b"500")
        try:
            return spawn(argv, env, self._real(request.get("cwd") or self.config.workdir), stdio)
        finally:
            self._set_oom_score(b"0")

    def kill_tree(self, command: Command) -> None:
        """KILL every process of a command, wherever it went."""
        others = {c.pid for c in self.running.values() if c is not command}
        me = os.getpid()

        def victims() -> set[int]:
            table = processes()
            roots = {command.pid} & set(table)
            for pid, (parent, born) in table.items():
                if parent == me and pid not in others and pid != command.pid:
                    marker = marker_of(pid)
                    unmarked = marker is None and not others and born >= command.started_boot - 0.02
                    if marker == command.key or unmarked:
                        roots.add(pid)
            return descendants(roots, table)

        kill_all(victims)

    def oom_happened(self) -> bool:
        before, self._ooms = self._ooms, oom_kills()
        return self._ooms > before

    def _open_oom_score(self) -> int:
        try:
            return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def _set_oom_score(self, score: bytes) -> None:
        if self._oom_score >= 0:
            os.pwrite(self._oom_score, score, 0)

    # --- files ---------------------------------------------------------------------------------

    def _real(self, path: str) -> str:
        """Where a path of the sandbox is. Relative ones stay inside the workdir, symlinks included."""
        config = self.config
        logical = os.path.normpath(os.path.join(config.workdir, path))
        real = logical
        for prefix, actual in ((config.workdir, config.home), ("/tmp", config.scratch)):
            if actual and (logical == prefix or logical.startswith(prefix.rstrip("/") + "/")):
                real = os.path.normpath(actual + "/" + logical[len(prefix) :])
                break
        resolved = os.path.realpath(real)
        if not os.path.isabs(path):
            self._inside(path, resolved, self._roots[:1])
        elif config.scratch:
            self._inside(path, resolved, self._roots)
        return resolved

    def _inside(self, path: str, resolved: str, roots: list[str]) -> None:
        for root in roots:
            if resolved == root or resolved.startswith(root.rstrip("/") + "/"):
                return
        raise Refused(403, "SANDBOX_FILE", f"{path}: leads out of {self.config.workdir}", blame="agent")

    def _open(self, path: str, real: str, flags: int) -> int:
        """A regular file of the sandbox. NONBLOCK, since opening a FIFO must not stop the loop."""
        fd = os.open(real, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refused(404, "SANDBOX_FILE", f"{path}: not a regular file", blame="agent")
        return fd

    def _read_file(self, path: str) -> bytes:
        try:
            with os.fdopen(self._open(path, self._real(path), os.O_RDONLY), "rb") as file:
                data = file.read(MAX_BODY + 1)
        except OSError as error:
            raise Refused(404, "SANDBOX_FILE", f"{path}: {error.strerror}", blame="agent") from None
        if len(data) > MAX_BODY:
            raise Refused(413, "SANDBOX_FILE", f"{path}: larger than {MAX_BODY} bytes", blame="agent")
        return data

    def _write_file(self, path: str, data: bytes, mode: int) -> None:
        try:
            real = self._real(path)
            if not os.path.isdir(os.path.dirname(real)):
                os.makedirs(os.path.dirname(real))
            with os.fdopen(self._open(path, real, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.truncate(0)
                os.fchmod(file.fileno(), mode & 0o777)
                file.write(data)
        except OSError as error:
            raise Refused(404, "SANDBOX_FILE", f"{path}: {error.strerror}", blame="agent") from None

    def write_files(self, files: dict[str, str]) -> None:
        """The files of the spec, before anyone is served. Refused when one cannot be written."""
        for path, text in files.items():
            self._write_file(path, text.encode(), 0o644)


def listen(config: dict[str, Any]) -> socket.socket:
    if "port" in config:
        listener = socket.socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.get("host", "0.0.0.0"), config["port"]))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config["socket"])
    listener.listen(64)
    return listener


def main() -> NoReturn:
    """`CONFIG_JSON` holds `port` or `socket`, the arguments of Config and `files`; the token is in SANDBOXD_TOKEN."""
    config = json.loads(sys.argv[1])
    listener = listen(config)
    token = os.environ.pop("SANDBOXD_TOKEN", "")
    if "port" in config and not token:
        sys.exit("sandboxd: a port needs SANDBOXD_TOKEN, since others can reach it")
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": config["workdir"], **config.get("env", {})}
    os.makedirs(config["workdir"], exist_ok=True)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    daemon = Daemon(Config(config["workdir"], config["ttl_s"], env, token=token), listener)
    daemon.write_files(config.get("files", {}))
    daemon.serve()


if __name__ == "__main__":
    main()
