"""The process whose forks are sandboxes: `python -m sandbox.backends.local.forkserver FOLDER IDLE_S`.

Started by the local backend, in a session of its own, so that it and its sandboxes outlive a controller that is
killed; the next controller connects again. Invariants: no sandbox outlives the fork server (it is the init of a
pid namespace around them all), and it ends by itself when nobody calls and nothing runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sandbox.backends.local import cgroups, errands, isolation, layers
from sandbox.backends.local import kernel as k
from sandbox.backends.local.birth import Ground, become
from sandbox.backends.local.child import Child, Done, cause_of
from sandbox.backends.local.peers import SOCKET, Peer, bind, hold
from sandbox.runtime.processes import descendants, kill_all, processes, set_subreaper

UIDS = 50_000
KEPT_CAUSES = 10_000
RETRY_S = 0.05
"""How soon to try again to remove a cgroup that still held a process."""


class ForkServer:
    """The event loop: creates, destroys, lists, and reports sandboxes that ended by themselves."""

    def __init__(self, folder: str, *, why_not: str, idle_s: float) -> None:
        self.why_not, self.idle_s = why_not, idle_s
        self._children: dict[str, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._ended: dict[str, str] = {}
        self._errands: set[int] = set()
        """Forks of ours that are no sandboxes."""
        self._packing: dict[str, list[Done]] = {}
        """Snapshots that are being made, with whom to tell that they are forgotten."""
        self._peers: set[Peer] = set()
        self._last_contact = time.monotonic()
        self._next_uid = 0
        self._cgroups, self.why_no_cgroups = cgroups.claim(folder)
        self._ground = Ground(folder, why_not, isolation.has_many_uids(), self._cgroups)
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
            self._thaw_forgotten()
            idle = not self._peers and not self._children
            if idle and time.monotonic() - self._last_contact > self.idle_s:
                self.shutdown()
            wait_s = self.idle_s if self._peers else min(1.0, self.idle_s)
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
        for child in self._children.values():
            self._let_die(child)
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
        if peer not in self._peers:
            return
        self._selector.unregister(peer.sock.fileno())
        peer.sock.close()
        self._peers.discard(peer)
        self._last_contact = time.monotonic()

    def handle(self, peer: Peer, message: Mapping[str, Any]) -> None:
        seq, name = message["seq"], message.get("id", "")

        def done(error: str) -> None:
            peer.send({"seq": seq, "error": error})

        match message["op"]:
            case "create":
                self.create(name, message["spec"], done)
            case "pause":
                self.pause(name, done)
            case "resume":
                self.resume(name, done)
            case "snapshot":
                self.snapshot(name, message["snapshot"], done)
            case "forget":
                self.forget(message["snapshot"], done)
            case "destroy":
                self.destroy(name, lambda: peer.send({"seq": seq}))
            case "list":
                peer.send({
                    "seq": seq, "live": list(self._children), "ended": self._ended,
                    "paused": [child.name for child in self._children.values() if child.frozen],
                    "why_not": self.why_not, "why_no_cgroups": self.why_no_cgroups,
                })  # fmt: skip
            case "shutdown":
                peer.send({"seq": seq})
                self.shutdown()
            case unknown:
                done(f"unknown operation {unknown!r}")

    # --- sandboxes -----------------------------------------------------------------------------

    def create(self, name: str, spec: Mapping[str, Any], created: Done) -> None:
        if name in self._children:
            created(f"sandbox {name} exists already")
            return
        if spec["snapshot"] and not os.path.exists(self._ground.snapshot(spec["snapshot"])):
            created(f"there is no snapshot {spec['snapshot']}")
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
            become(self._ground, name, spec, uid, listener, status_write)
        listener.close()
        os.close(status_write)
        child = self._children[name] = self._by_pid[pid] = Child(name, pid, uid, spec, status_read, created)
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

    def destroy(self, name: str, destroyed: Callable[[], None]) -> None:
        self._ended.pop(name, None)
        child = self._children.get(name)
        if child is None:
            destroyed()
            return
        child.destroyed.append(destroyed)
        self._let_die(child)
        if self.why_not:
            kill_all(lambda: descendants({child.pid}, table := processes()) & set(table))
        else:
            os.kill(child.pid, signal.SIGKILL)

    # --- standing still ------------------------------------------------------------------------

    def pause(self, name: str, done: Done) -> None:
        child = self._children.get(name)
        if child is None or child.frozen:
            done("" if child else f"there is no sandbox {name}")
            return

        def frozen(error: str) -> None:
            child.frozen = not error
            done(error)

        self._errand(functools.partial(errands.freeze, self._ground, name, child.pid), frozen)

    def resume(self, name: str, done: Done) -> None:
        """Also of one that is not known to be frozen, since freezing it may have failed halfway."""
        child = self._children.get(name)
        if child is None:
            done(f"there is no sandbox {name}")
            return

        def thawed(error: str) -> None:
            child.frozen = child.frozen and bool(error)
            done(error)

        self._errand(functools.partial(errands.thaw, self._ground, name, child.pid), thawed)

    def snapshot(self, name: str, snapshot_id: str, done: Done) -> None:
        child = self._children.get(name)
        if child is None or snapshot_id in self._packing:
            done(f"{snapshot_id} is being made" if child else f"there is no sandbox {name}")
            return
        self._packing[snapshot_id] = []

        def made(error: str) -> None:
            for forgotten in self._packing.pop(snapshot_id):
                self.forget(snapshot_id, forgotten)
            if error and not child.frozen and name in self._children:
                # It may have been left standing still.
                self.resume(name, lambda _: done(error))
            else:
                done(error)

        work = functools.partial(
            errands.snapshot, self._ground, name, child.pid, frozen=child.frozen,
            path=self._ground.snapshot(snapshot_id), limit=child.disk_bytes,
        )  # fmt: skip
        self._errand(work, made)

    def forget(self, snapshot_id: str, done: Done) -> None:
        """One that is being made for a controller that was killed is forgotten when it is made."""
        if snapshot_id in self._packing:
            self._packing[snapshot_id].append(done)
            return
        path = self._ground.snapshot(snapshot_id)
        # Whoever packed may have been killed halfway.
        for each in (path, layers.part_of(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each)
        done("")

    def _errand(self, work: Callable[[], None], done: Done) -> None:
        try:
            pid, read = errands.errand(work)
        except OSError as error:
            done(f"fork server: {error}")
            return
        said = bytearray()
        self._errands.add(pid)

        def tell() -> None:
            data = os.read(read, 4096)
            said.extend(data)
            if not data:
                self._selector.unregister(read)
                os.close(read)
                self._errands.discard(pid)
                done("" if said == b"ok" else said.decode(errors="replace") or "the fork that did it was killed")

        self.watch(read, tell)

    def _let_die(self, child: Child) -> None:
        """In v1, who is frozen by a cgroup does not even die."""
        if (child.frozen or self._errands) and self._cgroups is not None and self._cgroups.can_freeze:
            if not self.why_not:
                os.kill(child.pid, signal.SIGKILL)
            # One that has just begun has no cgroup yet.
            with contextlib.suppress(FileNotFoundError):
                self._cgroups.thaw(child.name)

    def _thaw_forgotten(self) -> None:
        """A lease ends also for one that stands still: after it, without a controller, its sandboxd ends it."""
        if self._peers:
            return
        for child in self._children.values():
            if child.frozen and time.monotonic() - self._last_contact > child.ttl_s:
                child.frozen = False
                self.resume(child.name, lambda _: None)

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
            me, known = os.getpid(), self._errands.union(self._by_pid)
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
            for peer in list(self._peers):
                peer.send({"ended": child.name, "cause": cause})

    def _remove_traces(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{name}.sock")
        if self.why_not and os.path.exists(name):
            # Python would recurse, and stop at folders that a task closed to itself.
            subprocess.run(["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', f"./{name}"], check=False)


def main() -> None:
    """Claim namespaces, become a daemon, and return in the parent once it listens."""
    folder, idle_s = os.path.realpath(sys.argv[1]), float(sys.argv[2])
    os.chdir(folder)
    os.makedirs("mnt", exist_ok=True)
    hold()
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
    # Whatever is imported later, in sandboxes too, comes from where no task may write.
    sys.path[:] = [path for path in sys.path if path.startswith(f"{os.path.realpath(sys.base_prefix)}/")]
    server = ForkServer(folder, why_not=why_not, idle_s=idle_s)
    os.write(write, b"1")
    os.close(write)
    server.serve()


if __name__ == "__main__":
    main()
