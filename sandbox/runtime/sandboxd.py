"""The runtime inside a sandbox: commands, files, health and the lease, over HTTP on a unix socket or a port.

Started by a backend as the sandbox's first process, through the fork server, `handoff` or `pod`; by itself as
`python -m sandbox.runtime.sandboxd CONFIG_JSON`. Called only by the controller. One thread, standard library only,
Python 3.7+, since it runs in other people's images.
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
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl, urlsplit

from sandbox.runtime.background import Background
from sandbox.runtime.commands import Command
from sandbox.runtime.files import Files
from sandbox.runtime.processes import (
    MARKER,
    bears,
    descendants,
    kill_all,
    marked,
    marker_of,
    may_change_user,
    oom_counter,
    oom_kills,
    processes,
    set_subreaper,
    spawn,
)
from sandbox.runtime.shells import Shells, Turn
from sandbox.runtime.wire import Connection, Refused, failure

C = TypeVar("C", bound=Command)

FROZEN_S = 2.0
"""How late a turn of the loop must come to mean that we were paused."""
GRACE_S = 5.0
"""Seconds after the lease's end until the sandbox ends itself; the controller closes it before."""
KEPT_RESULTS, KEPT_BYTES = 512, 8 << 20
"""How many answers stay for replay, and their bytes; older ones are forgotten, their keys are not."""
LONGEST_SLEEP_S = 3600.0
"""Of the loop; the kernel takes no waits of more than 24 days."""
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
        oom_counter: int = -1,
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
        self.oom_counter = oom_counter
        """Descriptor of the cgroup's file that counts kills for memory; -1: look for it inside."""


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
        self._oom_counter = config.oom_counter if config.oom_counter >= 0 else oom_counter()
        self._ooms_told = 0
        """Kills for memory that were some command's end."""
        self.files = Files(config)
        self.background = Background(self)
        self.shells = Shells(self)
        self._oom_score = self._open_oom_score()
        # A kubelet gives its pods a score, below which nobody unprivileged may go.
        self._own_oom_score = int(os.pread(self._oom_score, 16, 0)) if self._oom_score >= 0 else 0
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
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def serve(self) -> NoReturn:
        wake = float("inf")
        while True:
            now = time.monotonic()
            if now > wake + FROZEN_S:
                # The controller looked after the lease while we could not, and will tell us when it ends.
                self.extend()
            # A running command holds the lease until its own deadline.
            if now > GRACE_S + max([self._lease, *(c.deadline for c in self.running.values() if c.holds_lease)]):
                self.exit(LEASE_ENDED)
            for command in [c for c in self.running.values() if c.deadline <= now]:
                command.expire()
            polls = self.background.polls
            if polls:
                self.background.answer_polls(now)
            deadlines = [c.deadline for c in self.running.values()] + [poll.deadline for poll in polls]
            wake = min([self._lease + GRACE_S, *deadlines])
            for key, _ in self._selector.select(min(max(0.0, wake - time.monotonic()) + 0.001, LONGEST_SLEEP_S)):
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
        except OSError:
            # It left again, or we have as many descriptors as we may.
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
        except ImportError as error:
            why = f"{method} {url.path}: the Python of this sandbox lacks a module: {error}"
            connection.reply(501, Refused(501, "UNSUPPORTED", f"sandboxd: {why}").body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{method} {url.path}: {type(error).__name__}: {error}"
            connection.reply(400, Refused(400, "BAD_REQUEST", f"sandboxd: {why}").body)
        except Exception as error:
            connection.reply(500, failure(f"{method} {url.path}", error).body)

    def _route(
        self, connection: Connection, route: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        if route == "POST /exec":
            self._exec(connection, headers["idempotency-key"], body)
        elif route == "GET /exec":
            self._result(connection, query["key"])
        elif route.endswith(" /files") or route.endswith(" /tar"):
            self.files.route(connection, route, query, body)
        elif route == "POST /renew":
            self.renew(float(json.loads(body)["ttl_s"]))
            connection.reply(200, b"{}")
        elif route == "POST /prepare":
            wanted = json.loads(body)
            self.files.write_all(wanted["files"])
            self.renew(float(wanted["ttl_s"]))
            connection.reply(200, b"{}")
        elif route == "GET /health":
            left = self._lease - time.monotonic()
            connection.reply(200, json.dumps({"running": len(self.running), "lease_s": left}).encode())
        elif route.partition(" ")[2].startswith("/processes"):
            method, _, path = route.partition(" ")
            self.background.route(connection, method, path, query, headers.get("idempotency-key", ""), body)
        elif route.partition(" ")[2].startswith("/shells"):
            method, _, path = route.partition(" ")
            self.shells.route(connection, method, path, headers.get("idempotency-key", ""), body)
        else:
            raise Refused(404, "NOT_FOUND", f"sandboxd has no route {route}")

    def renew(self, ttl_s: float) -> None:
        self._lease = time.monotonic() + ttl_s

    def extend(self) -> None:
        self._lease = max(self._lease, time.monotonic() + self.config.ttl_s)

    # --- commands ------------------------------------------------------------------------------

    def _exec(self, connection: Connection, key: str, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()
        known = self._by_key.get(key)
        if known is None:
            if key in self._forgotten:
                self._result(connection, key)
            request = json.loads(body)
            known = self._by_key[key] = self.launch(Command, key, digest, request)
        elif known.digest != digest:
            raise Refused(409, "CONFLICT", f"exec key {key!r} was used with another request: take a fresh key")
        self.answer_when_done(connection, known)

    def launch(self, kind: type[C], key: str, digest: str, request: dict[str, Any]) -> C:
        """Start a command, which extends the lease. Refused when it cannot be executed."""
        try:
            command = kind(self, key, digest, request)
        except OSError as error:
            # EAGAIN is the process limit: what this sandbox may use, so still the agent's doing.
            message = f"cannot execute {request.get('argv', ['?'])[0]!r}: {error.strerror}"
            raise Refused(400, "SANDBOX", message, blame="agent") from None
        self.running[command.pid] = command
        self.extend()
        return command

    def _result(self, connection: Connection, key: str) -> None:
        command = self._by_key.get(key)
        if command is not None:
            self.answer_when_done(connection, command)
        elif key in self._forgotten:
            raise Refused(410, "SANDBOX", f"exec {key!r} ran, but its result is no longer kept", "infra", "yes")
        else:
            raise Refused(404, "NOT_FOUND", f"no exec with key {key!r} was received")

    def answer_when_done(self, connection: Connection, command: Command | Turn) -> None:
        if command.answer:
            connection.reply(200, command.answer)
        else:
            connection.waiting_for = command
            command.waiters.append(connection)

    def finished(self, command: Command) -> None:
        del self.running[command.pid]
        self.extend()
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

    def spawn(self, request: dict[str, Any], marker: str, stdio: tuple[int, ...], tty: str = "") -> int:
        argv, user = request["argv"], request.get("user", "")
        if not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("argv must be a list of strings that is not empty")
        if user and not may_change_user():
            raise Refused(501, "UNSUPPORTED", f"cannot run as user {user!r}: the runtime here may not change users")
        env = {**self.config.env, **request.get("env", {}), MARKER: marker}
        # A child inherits the score at its birth: this way the kernel's OOM killer takes commands before us,
        # and lowering ours again to what it was needs no privilege.
        self._set_oom_score(min(1000, self._own_oom_score + 500))
        try:
            cwd = self.files.real(request.get("cwd") or self.config.workdir)
            with marked(marker):
                return spawn(argv, env, cwd, stdio, user, tty)
        finally:
            self._set_oom_score(self._own_oom_score)

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
                    if marker == command.marker or unmarked or bears(pid, command.marker):
                        roots.add(pid)
            return descendants(roots, table)

        kill_all(victims)

    def oom_kills(self) -> int:
        """How often the kernel killed for memory here so far."""
        return oom_kills(self._oom_counter)

    def took_oom(self, before: int) -> bool:
        """Whether a command that was killed, and began at the count `before`, was so for memory; a kill counts once."""
        told = max(self._ooms_told, before)
        if self.oom_kills() <= told:
            return False
        self._ooms_told = told + 1
        return True

    def _open_oom_score(self) -> int:
        try:
            return os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return -1

    def _set_oom_score(self, score: int) -> None:
        if self._oom_score >= 0:
            os.pwrite(self._oom_score, b"%d" % score, 0)


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
    daemon.files.write_all(config.get("files", {}))
    daemon.serve()


if __name__ == "__main__":
    main()
