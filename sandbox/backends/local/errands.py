"""What takes a while with one sandbox, in a fork of the fork server, so that its loop goes on: freezing, snapshots.

Used by `forkserver`. Invariant: every process of a frozen sandbox stands still, and what is packed is of one moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from sandbox.backends.local import kernel as k
from sandbox.backends.local import layers
from sandbox.backends.local.birth import Ground, keep_only
from sandbox.runtime.processes import descendants, processes, send

STANDSTILL_S = 5.0


def errand(work: Callable[[], None]) -> tuple[int, int]:
    """Begin `work` in a fork: its pid, and a descriptor that says `ok`, what went wrong, or nothing (it was killed)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid > 0:
        os.close(write)
        return pid, read
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep_only(write)
        work()
        os.write(write, b"ok")
    except BaseException as error:
        os.write(write, f"{type(error).__name__}: {error}"[:4000].encode())
    os._exit(0)


def freeze(ground: Ground, name: str, pid: int) -> None:
    """Stop the sandbox whose first process is `pid`: by its cgroup, or by a signal to everyone in it."""
    if ground.cgroups is not None and ground.cgroups.can_freeze:
        ground.cgroups.freeze(name, within_s=STANDSTILL_S)
        return
    os.kill(pid, signal.SIGSTOP)
    if ground.why_not:
        _stop_tree(pid)
    else:
        _inside(pid, lambda: _tell_all(signal.SIGSTOP))


def thaw(ground: Ground, name: str, pid: int) -> None:
    if ground.cgroups is not None and ground.cgroups.can_freeze:
        ground.cgroups.thaw(name)
        return
    if ground.why_not:
        for below in descendants({pid}, processes()):
            send(below, signal.SIGCONT)
    else:
        _inside(pid, lambda: _tell_all(signal.SIGCONT))
        os.kill(pid, signal.SIGCONT)


def snapshot(ground: Ground, name: str, pid: int, *, frozen: bool, path: str, limit: int) -> None:
    """Pack what the sandbox wrote into a new file at `path`; `frozen` says whether it stands still already."""
    os.makedirs(os.path.dirname(path), exist_ok=True, mode=0o700)
    part = layers.part_of(path)
    if not frozen:
        freeze(ground, name, pid)
    try:
        with open(part, "wb") as file:
            if ground.why_not:
                layers.pack(f"{ground.folder}/{name}", file, limit)
            else:
                _inside(pid, lambda: layers.pack("/", file, limit))
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    finally:
        if not frozen:
            thaw(ground, name, pid)


def _stop_tree(pid: int) -> None:
    stopped: set[int] = set()
    while fresh := descendants({pid}, processes()) - stopped:
        for below in fresh:
            send(below, signal.SIGSTOP)
        stopped |= fresh


def _inside(pid: int, work: Callable[[], None]) -> None:
    """Do it in a process in the namespaces of the sandbox, outside of its cgroup. OSError when it fails there."""
    read, write = os.pipe()
    helper = os.fork()
    if helper == 0:
        _enter_and_work(pid, work, write)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(helper, 0)
    if said != b"ok":
        raise OSError(said.decode(errors="replace") or "the process that was sent into the sandbox was killed")


def _enter_and_work(pid: int, work: Callable[[], None], write: int) -> NoReturn:
    try:
        # Nothing is to be imported from where the task may write.
        sys.path.clear()
        k.setns(os.pidfd_open(pid), k.CLONE_NEWPID | k.CLONE_NEWNS)
        # A pid namespace is that of children only.
        worker = os.fork()
        if worker == 0:
            work()
            os.write(write, b"ok")
        else:
            os.waitpid(worker, 0)
    except BaseException as error:
        os.write(write, str(error)[:4000].encode())
    os._exit(0)


def _tell_all(number: signal.Signals) -> None:
    """Signal everyone in our pid namespace but its init and ourselves; for STOP, wait until they stand still."""
    until, me = time.monotonic() + STANDSTILL_S, os.getpid()
    # The init, which was told to stop already, starts no more processes once it stands still.
    while number == signal.SIGSTOP and 1 in _moving() and time.monotonic() < until:
        time.sleep(0.0005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)
    while number == signal.SIGSTOP and _moving() - {me}:
        if time.monotonic() > until:
            raise TimeoutError(f"processes of the sandbox do not stop: {sorted(_moving() - {me})}")
        time.sleep(0.0005)


def _moving() -> set[int]:
    """Processes that are neither stopped nor dead."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X"):
                found.add(int(name))
    return found
