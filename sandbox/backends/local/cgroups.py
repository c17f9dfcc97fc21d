"""Memory, processes and CPU of a whole sandbox: cgroups v1 and v2. Used by `forkserver`.

Invariant: every cgroup made here lies in one folder of each hierarchy, named after the fork server's own folder, so
that what a killed fork server left is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
LEGACY = (*CONTROLLERS, "freezer")
"""In v2 every cgroup can freeze."""
PERIOD_US = 100_000


class Cgroups:
    """The hierarchies that we may use, below the cgroup that we run in."""

    def __init__(self, bases: Mapping[str, str], *, unified: bool) -> None:
        self.bases = bases
        """Controller to the folder that holds one cgroup a sandbox; all the same one in v2."""
        self.unified = unified
        self.leftover: set[str] = set()
        """Sandboxes whose cgroups still hold a process that is on its way out; the next `retry` may remove them."""

    def place(self, name: str, limits: Mapping[str, Any]) -> int:
        """Make a sandbox's cgroups, put the calling process there, and open what counts its OOM kills."""
        for controller, base in self.bases.items():
            folder = f"{base}/{name}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            for file, value in self._settings(controller, limits):
                _write(f"{folder}/{file}", value)
        for folder in {f"{base}/{name}" for base in self.bases.values()}:
            # 0 is the writer itself. A thread that moves itself, as v1 allows, waits for no RCU grace period.
            _write(f"{folder}/{'cgroup.procs' if self.unified else 'tasks'}", "0")
        return os.open(self._oom_file(name), os.O_RDONLY | os.O_CLOEXEC)

    def _settings(self, controller: str, limits: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
        quota = max(1000, int(limits["cpus"] * PERIOD_US))
        # Files of a sandbox are on a tmpfs, which counts as its memory too.
        memory = str((limits["memory_mb"] + limits["disk_mb"]) << 20)
        if controller == "pids":
            yield "pids.max", str(limits["pids"])
        elif controller == "cpu" and self.unified:
            yield "cpu.max", f"{quota} {PERIOD_US}"
        elif controller == "cpu":
            yield "cpu.cfs_period_us", str(PERIOD_US)
            yield "cpu.cfs_quota_us", str(quota)
        elif controller == "memory" and self.unified:
            yield "memory.max", memory
            if os.path.exists(f"{self.bases['memory']}/memory.swap.max"):
                yield "memory.swap.max", "0"
        elif controller == "memory":
            yield "memory.limit_in_bytes", memory
            if os.path.exists(f"{self.bases['memory']}/memory.memsw.limit_in_bytes"):
                yield "memory.memsw.limit_in_bytes", memory

    def _oom_file(self, name: str) -> str:
        return f"{self.bases['memory']}/{name}/{'memory.events' if self.unified else 'memory.oom_control'}"

    def oom_kills(self, name: str) -> int:
        """How often the kernel killed for memory in a sandbox; 0 when it has no cgroup any more."""
        try:
            with open(self._oom_file(name)) as file:
                return int(dict(line.split() for line in file).get("oom_kill", 0))
        except FileNotFoundError:
            return 0

    @property
    def can_freeze(self) -> bool:
        return self.unified or "freezer" in self.bases

    def freeze(self, name: str, *, within_s: float) -> None:
        """Stop everyone in a sandbox; returns when they stand still."""
        folder, until = self._freezer(name), time.monotonic() + within_s
        state, wanted = ("cgroup.events", "frozen 1") if self.unified else ("freezer.state", "FROZEN")
        _write(f"{folder}/{'cgroup.freeze' if self.unified else state}", "1" if self.unified else wanted)
        while wanted not in _read(f"{folder}/{state}"):
            if time.monotonic() > until:
                raise TimeoutError(f"sandbox {name} does not stand still after {within_s:.0f} s")
            time.sleep(0.0005)

    def thaw(self, name: str) -> None:
        folder = self._freezer(name)
        _write(f"{folder}/{'cgroup.freeze' if self.unified else 'freezer.state'}", "0" if self.unified else "THAWED")

    def _freezer(self, name: str) -> str:
        return f"{self.bases['memory' if self.unified else 'freezer']}/{name}"

    def remove(self, name: str) -> None:
        """Remove a sandbox's cgroups, now or at a later `retry`."""
        self.leftover.add(name)
        self.retry()

    def retry(self) -> None:
        for name in list(self.leftover):
            removed = [_rmdir(f"{base}/{name}") for base in set(self.bases.values())]
            if all(removed):
                self.leftover.discard(name)
            elif self.can_freeze:
                # A fork server that was killed may have left it frozen, and in v1 such processes do not even die.
                with contextlib.suppress(FileNotFoundError):
                    self.thaw(name)

    def clear(self) -> None:
        """Remove what an earlier fork server left."""
        for base in set(self.bases.values()):
            for entry in os.scandir(base):
                if entry.is_dir():
                    self.remove(entry.name)

    def close(self) -> None:
        """Remove everything; whoever was inside must be gone."""
        self.clear()
        for base in set(self.bases.values()):
            _rmdir(base)


def name_of(folder: str) -> str:
    """What the folder of a fork server's cgroups is called."""
    return f"agentrl-{hashlib.sha256(folder.encode()).hexdigest()[:12]}"


def claim(folder: str) -> tuple[Cgroups | None, str]:
    """The cgroups of the fork server in `folder`, empty; or why there are none."""
    try:
        found = find(name_of(folder))
        found.clear()
    except OSError as error:
        return None, str(error)
    return found, ""


def find(name: str, root: str = "") -> Cgroups:
    """What this process may use; OSError, saying why, when it may not limit memory. `root` is for tests."""
    with open(f"{root}/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    with open(f"{root}/proc/self/cgroup") as file:
        own = {kinds: path for _, kinds, path in (line.strip().split(":", 2) for line in file)}
    legacy: dict[str, str] = {}
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup":
            for kinds, path in own.items():
                kind = next((k for k in LEGACY if k in kinds.split(",") and k in fields[-1].split(",")), "")
                if kind:
                    legacy[kind] = f"{_own_folder(root, fields, path)}/{name}"
    if "memory" in legacy:
        for base in legacy.values():
            os.makedirs(base, exist_ok=True)
        return Cgroups(legacy, unified=False)
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup2" and "" in own:
            return _unified(root + fields[4], _own_folder(root, fields, own[""]), name)
    raise FileNotFoundError("no cgroup hierarchy is mounted")


def _own_folder(root: str, fields: list[str], path: str) -> str:
    """The cgroup at `path` below a mount point that may show a part of the hierarchy only."""
    shown, point = fields[3].rstrip("/"), root + fields[4]
    inside = path[len(shown) :] if path.startswith(shown) else ""
    return (point + inside).rstrip("/")


def _unified(top: str, folder: str, name: str) -> Cgroups:
    """v2: a cgroup with processes can't have children with controllers, so the nearest ancestor that can is taken."""
    wanted = " ".join(f"+{controller}" for controller in CONTROLLERS)
    why = OSError(f"no cgroup from {folder} up has the controllers {', '.join(CONTROLLERS)}")
    while True:
        try:
            with open(f"{folder}/cgroup.controllers") as file:
                if set(CONTROLLERS) <= set(file.read().split()):
                    _write(f"{folder}/cgroup.subtree_control", wanted)
                    base = f"{folder}/{name}"
                    os.makedirs(base, exist_ok=True)
                    _write(f"{base}/cgroup.subtree_control", wanted)
                    return Cgroups(dict.fromkeys(CONTROLLERS, base), unified=True)
        except OSError as error:
            why = error
        if folder == top:
            raise why
        folder = os.path.dirname(folder)


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _rmdir(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
