"""The process whose forks are sandboxes: `python -m sandbox.backends.local.forkserver FOLDER IDLE_S`.

Started by the local backend, in a session of its own, so that it and its sandboxes outlive a controller that is
killed; the next controller connects again. Invariants: no sandbox outlives the fork server (it is the init of a
pid namespace around them all), and it ends by itself when nobody calls and nothing runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sandbox.backends.local import cgroups, isolation
from sandbox.backends.local import kernel as k
from sandbox.runtime.processes import descendants, kill_all, processes, set_subreaper
from sandbox.runtime.sandboxd import LEASE_ENDED, Config, Daemon

SOCKET, LOCK = "forkserver.sock", "forkserver.lock"
UIDS = 50_000
KEPT_CAUSES = 10_000
LOCK_S = 10.0
RETRY_S = 0.05
"""How soon to try again to remove a cgroup that still held a process."""


class Child:
    """One sandbox's first process."""

    def __init__(self, name: str, pid: int, uid: int, status_fd: int, created: Callable[[str], None]) -> None:
        self.name, self.pid, self.uid, self.status_fd = name, pid, uid, status_fd
        self.created = created
        """Called once with "" when the sandbox serves, or with what went wrong."""
        self.error = b""
        self.destroyed: list[Callable[[], None]] = []
        """Called when it is gone; not empty means that somebody asked for it."""


class Peer:
    """A connected controller: JSON lines both ways."""

    def __init__(self, server: ForkServer, sock: socket.socket) -> None:
        self.server, self.sock = server, sock
        self._inbox = bytearray()
        server.watch(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.server.disconnected(self)
            return
        self._inbox += data
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest
        for line in lines:
            self.server.handle(self, json.loads(line))

    def send(self, message: Mapping[str, Any]) -> None:
        # Blocking is right here: messages are short, and a controller that does not read is dead.
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")


class ForkServer:
    """The event loop: creates, destroys, lists, and reports sandboxes that ended by themselves."""

    def __init__(self, folder: str, *, why_not: str, idle_s: float) -> None:
        self.folder, self.why_not, self.idle_s = folder, why_not, idle_s
        self._children: dict[str, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._ended: dict[str, str] = {}
        self._peers: set[Peer] = set()
        self._last_contact = time.monotonic()
        self._next_uid = 0
        self._many_uids = isolation.has_many_uids()
        self._cgroups, self.why_no_cgroups = cgroups.claim(folder)
        self._selector = selectors.DefaultSelector()
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = bind(SOCKET)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if why_not:
            signal.signal(signal.SIGTERM, lambda *_: self.shutdown())
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.watch(self._wake, self._reap)
        self.watch(self._listener.fileno(), self._accept)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, call)

    def serve(self) -> NoReturn:
        gc.collect()
        gc.freeze()
        while True:
            idle = not self._peers and not self._children
            if idle and time.monotonic() - self._last_contact > self.idle_s:
                self.shutdown()
            wait_s = self.idle_s if not idle else min(1.0, self.idle_s)
            if self._cgroups is not None and self._cgroups.leftover:
                self._cgroups.retry()
                wait_s = min(wait_s, RETRY_S)
            for key, _ in self._selector.select(wait_s):
                # A call before this one may have closed the descriptor, and another may have its number by now.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()

    def shutdown(self) -> NoReturn:
        """End, and with us every sandbox."""
        me = os.getpid()
        kill_all(lambda: descendants({me}, self._visible()) - {me})
        if self._cgroups is not None:
            # These must be gone before we are, since nobody is left then to remove their cgroups.
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
            self._cgroups.close()
        for name in list(self._children):
            self._remove_traces(name)
        os.unlink(SOCKET)
        os._exit(0)

    def _visible(self) -> dict[int, tuple[int, float]]:
        """Processes below us by parent. As a namespace's init there is no need to look: the kernel kills them."""
        return processes() if self.why_not else {}

    # --- controllers ---------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._peers.add(Peer(self, sock))

    def disconnected(self, peer: Peer) -> None:
        self._selector.unregister(peer.sock.fileno())
        peer.sock.close()
        self._peers.discard(peer)
        self._last_contact = time.monotonic()

    def handle(self, peer: Peer, message: Mapping[str, Any]) -> None:
        seq, name = message["seq"], message.get("id", "")
        match message["op"]:
            case "create":
                self.create(name, message["spec"], lambda error: peer.send({"seq": seq, "error": error}))
            case "destroy":
                self.destroy(name, lambda: peer.send({"seq": seq}))
            case "list":
                peer.send({
                    "seq": seq, "live": list(self._children), "ended": self._ended,
                    "why_not": self.why_not, "why_no_cgroups": self.why_no_cgroups,
                })  # fmt: skip
            case "shutdown":
                peer.send({"seq": seq})
                self.shutdown()
            case unknown:
                peer.send({"seq": seq, "error": f"unknown operation {unknown!r}"})

    # --- sandboxes -----------------------------------------------------------------------------

    def create(self, name: str, spec: Mapping[str, Any], created: Callable[[str], None]) -> None:
        if name in self._children:
            created(f"sandbox {name} exists already")
            return
        uid = self._free_uid()
        with contextlib.ExitStack() as undo:
            try:
                listener = bind(f"{name}.sock")
                undo.callback(self._remove_traces, name)
                undo.callback(listener.close)
                status_read, status_write = os.pipe()
                for fd in (status_read, status_write):
                    undo.callback(os.close, fd)
                pid = self._fork()
            except OSError as error:
                created(f"fork server: {error}")
                return
            undo.pop_all()
        if pid == 0:
            self._become(name, spec, uid, listener, status_write)
        listener.close()
        os.close(status_write)
        child = self._children[name] = self._by_pid[pid] = Child(name, pid, uid, status_read, created)
        self.watch(status_read, lambda: self._status(child))

    def _fork(self) -> int:
        """Fork; the child is the init of a new pid namespace where namespaces are allowed."""
        if self.why_not:
            return os.fork()
        k.unshare(k.CLONE_NEWPID)
        try:
            pid = os.fork()
        except OSError:
            k.setns(self._pid_namespace, k.CLONE_NEWPID)
            raise
        if pid:
            k.setns(self._pid_namespace, k.CLONE_NEWPID)
        return pid

    def _free_uid(self) -> int:
        taken = {child.uid for child in self._children.values()}
        while True:
            self._next_uid = (self._next_uid + 1) % UIDS
            if isolation.FIRST_UID + self._next_uid not in taken:
                return isolation.FIRST_UID + self._next_uid

    def _become(self, name: str, spec: Mapping[str, Any], uid: int, listener: socket.socket, status: int) -> NoReturn:
        """In the child: set up, report, serve. Never returns into the fork server's loop."""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            kept = sorted((listener.fileno(), status))
            os.closerange(3, kept[0])
            os.closerange(kept[0] + 1, kept[1])
            os.closerange(kept[1] + 1, 1 << 20)
            # Short-lived, and a collection would touch, and so copy, every page shared with the fork server.
            gc.set_threshold(20_000)
            daemon = self._isolated(name, spec, uid, listener) if not self.why_not else self._bare(name, spec, listener)
            daemon.files.write_all(spec["files"])
            os.write(status, b"ok")
            os.close(status)
            daemon.serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(status, f"{type(error).__name__}: {error}"[:4000].encode())
            os._exit(70)

    def _isolated(self, name: str, spec: Mapping[str, Any], uid: int, listener: socket.socket) -> Daemon:
        owner, limits = uid if self._many_uids else 0, spec["limits"]
        counter, memory_mb = self._limit(name, limits)
        isolation.enter(f"{self.folder}/root", f"{self.folder}/mnt", name, owner, spec)
        env = _environment(spec, spec["workdir"])
        daemon = Daemon(Config(spec["workdir"], spec["ttl_s"], env, oom_counter=counter), listener)
        isolation.limit_resources(memory_mb, limits["pids"] if owner else None)
        isolation.drop_privileges(owner)
        return daemon

    def _bare(self, name: str, spec: Mapping[str, Any], listener: socket.socket) -> Daemon:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        home, scratch = f"{self.folder}/{name}/work", f"{self.folder}/{name}/tmp"
        os.makedirs(home)
        os.makedirs(scratch)
        env = {**_environment(spec, home), "TMPDIR": scratch}
        counter, memory_mb = self._limit(name, spec["limits"])
        isolation.limit_resources(memory_mb, None)
        config = Config(spec["workdir"], spec["ttl_s"], env, home=home, scratch=scratch, oom_counter=counter)
        return Daemon(config, listener)

    def _limit(self, name: str, limits: Mapping[str, Any]) -> tuple[int, int | None]:
        """Put ourselves under the sandbox's limits: its OOM counter, and the memory that is left to rlimits."""
        return (-1, limits["memory_mb"]) if self._cgroups is None else (self._cgroups.place(name, limits), None)

    def destroy(self, name: str, destroyed: Callable[[], None]) -> None:
        self._ended.pop(name, None)
        child = self._children.get(name)
        if child is None:
            destroyed()
            return
        child.destroyed.append(destroyed)
        if self.why_not:
            kill_all(lambda: descendants({child.pid}, table := processes()) & set(table))
        else:
            os.kill(child.pid, signal.SIGKILL)

    # --- what children tell --------------------------------------------------------------------

    def _status(self, child: Child) -> None:
        data = os.read(child.status_fd, 4096)
        if data and data != b"ok":
            child.error += data
            return
        self._selector.unregister(child.status_fd)
        os.close(child.status_fd)
        child.status_fd = -1
        if data:
            child.created("")
            child.created = lambda _: None

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
            child = self._by_pid.pop(pid, None)
            if child is not None:
                self._gone(child, status)

    def _gone(self, child: Child, status: int) -> None:
        del self._children[child.name]
        while child.status_fd >= 0:
            self._status(child)
        if self.why_not:
            me, known = os.getpid(), set(self._by_pid)
            kill_all(lambda: {pid for pid, (parent, _) in processes().items() if parent == me} - known)
        cause = child.error.decode(errors="replace") or cause_of(status)
        if self._cgroups is not None:
            if os.WIFSIGNALED(status) and self._cgroups.oom_kills(child.name):
                cause += " (the sandbox was out of memory)"
            self._cgroups.remove(child.name)
        self._remove_traces(child.name)
        child.created(cause)
        for destroyed in child.destroyed:
            destroyed()
        if not child.destroyed and not child.error:
            self._ended[child.name] = cause
            while len(self._ended) > KEPT_CAUSES:
                del self._ended[next(iter(self._ended))]
            for peer in self._peers:
                peer.send({"ended": child.name, "cause": cause})

    def _remove_traces(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{name}.sock")
        if self.why_not:
            shutil.rmtree(name, ignore_errors=True)


def bind(path: str) -> socket.socket:
    """Listen on a relative path: the folder's own may be longer than a socket address can be."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def cause_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"sandboxd was killed by signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return "the lease ended without renewal" if code == LEASE_ENDED else f"sandboxd exited with code {code}"


def _environment(spec: Mapping[str, Any], home: str) -> dict[str, str]:
    path = f"{os.path.realpath(sys.base_prefix)}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8", "USER": "agent", **spec["env"]}


def _lock() -> None:
    """Hold the folder for our lifetime, or leave it to one that serves there already.

    One that was killed may hold it for a moment still, and one that has just begun does not serve yet.
    """
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(SOCKET)
                os._exit(0)
            if time.monotonic() > until:
                raise
        time.sleep(0.02)


def main() -> None:
    """Claim namespaces, become a daemon, and return in the parent once it listens."""
    folder, idle_s = os.path.realpath(sys.argv[1]), float(sys.argv[2])
    os.chdir(folder)
    os.makedirs("mnt", exist_ok=True)
    _lock()
    why_not = isolation.probe(folder)
    if not why_not:
        isolation.claim_namespaces()
        isolation.build_template(f"{folder}/root")
        isolation.forswear()
    read, write = os.pipe()
    if os.fork() > 0:
        os.close(write)
        os._exit(0 if os.read(read, 1) else 1)
    os.close(read)
    set_subreaper()
    server = ForkServer(folder, why_not=why_not, idle_s=idle_s)
    os.write(write, b"1")
    os.close(write)
    server.serve()


if __name__ == "__main__":
    main()
