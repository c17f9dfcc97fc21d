"""Sandboxes in memory: `agentrl.core.protocols.Sandboxes` without a process, for fast tests of other rooms.

Invariant: keeps the protocol's promises (keys, leases, capacity, close in every state), as the contract tests
check; what a command does is up to the callable that the test hands in.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.core.errors import CapacityError, Conflict, NotFound, Ran, SandboxFileError, SandboxLost
from agentrl.core.types import ExecRequest, ExecResult, SandboxSpec, SandboxState, SandboxView, Snapshot

LIVE = frozenset({SandboxState.READY, SandboxState.PAUSED})


@dataclass
class Box:
    """One sandbox's state, open to tests."""

    id: str
    owner: str
    key: str
    spec: SandboxSpec
    files: dict[str, bytes]
    """Absolute path to content."""
    deadline: float
    created_at: float = field(default_factory=time.time)
    state: SandboxState = SandboxState.READY
    cause: str = ""
    results: dict[str, tuple[ExecRequest, ExecResult]] = field(default_factory=dict)
    """Answers by idempotency key."""
    calls: dict[str, str] = field(default_factory=dict)
    """What paused and resumed it, by idempotency key."""

    def path(self, path: str) -> str:
        """Absolute and normal; a relative path that leaves the workdir is refused."""
        full = posixpath.normpath(posixpath.join(self.spec.workdir, path))
        if not posixpath.isabs(path) and not full.startswith(self.spec.workdir.rstrip("/") + "/"):
            raise SandboxFileError(f"{path}: leads out of {self.spec.workdir}")
        return full

    def end(self, state: SandboxState, cause: str) -> None:
        if self.state in LIVE:
            self.state, self.cause = state, cause


Commands = Callable[[Box, ExecRequest], ExecResult]
"""Carries out one command on a box; may change its files, and may raise SandboxError."""


def shell(box: Box, request: ExecRequest) -> ExecResult:
    """The default commands: `true`, `false`, `echo WORDS`, `cat FILES`, `ls`; anything else exits with 127."""
    out, code = b"", 0
    match request.argv:
        case ("true",):
            pass
        case ("false",):
            code = 1
        case ("echo", *words):
            out = " ".join(words).encode() + b"\n"
        case ("cat",):
            out = request.stdin
        case ("cat", *paths) if all(box.path(path) in box.files for path in paths):
            out = b"".join(box.files[box.path(path)] for path in paths)
        case ("ls",):
            prefix = box.spec.workdir.rstrip("/") + "/"
            names = {path[len(prefix) :].partition("/")[0] for path in box.files if path.startswith(prefix)}
            out = "".join(f"{name}\n" for name in sorted(names)).encode()
        case (program, *_):
            failed = ExecResult(status="EXITED", exit_code=127 if program != "cat" else 1, stderr=b"failed\n")
            return failed.model_copy(update={"stderr_total": len(failed.stderr)})
    return result(out, code)


def result(stdout: bytes = b"", exit_code: int = 0, *, cap: int = 1 << 20) -> ExecResult:
    """An ExecResult of a command that exited, with its output capped as sandboxd caps it."""
    head = (cap + 1) // 2
    kept = stdout if len(stdout) <= cap else stdout[:head] + stdout[len(stdout) - (cap - head) :]
    return ExecResult(status="EXITED", exit_code=exit_code, stdout=kept, stdout_total=len(stdout))


class InMemorySandbox:
    """A handle to a Box."""

    def __init__(self, sandboxes: InMemorySandboxes, box: Box) -> None:
        self._sandboxes = sandboxes
        self.box = box

    @property
    def id(self) -> str:
        return self.box.id

    async def exec(self, request: ExecRequest, *, key: str | None = None) -> ExecResult:
        box = self._live()
        if key is not None and key in box.results:
            earlier, answer = box.results[key]
            if earlier != request:
                raise Conflict(f"exec key {key!r} was used with another request: take a fresh key")
            return answer
        answer = self._sandboxes.commands(box, request)
        box.deadline = time.time() + box.spec.ttl_s
        if key is not None:
            box.results[key] = (request, answer)
        return answer

    async def read(self, path: str) -> bytes:
        box = self._live()
        full = box.path(path)
        if full not in box.files:
            raise SandboxFileError(f"{path}: No such file or directory")
        return box.files[full]

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        box = self._live()
        box.files[box.path(path)] = data

    async def renew(self, ttl_s: float) -> None:
        self._live(paused=True).deadline = time.time() + ttl_s

    async def pause(self, *, ttl_s: float | None = None, key: str | None = None) -> None:
        self._move(SandboxState.PAUSED, f"pause {ttl_s}", ttl_s, key or uuid.uuid4().hex)

    async def resume(self, *, key: str | None = None) -> None:
        self._move(SandboxState.READY, "resume", None, key or uuid.uuid4().hex)

    def _move(self, state: SandboxState, call: str, ttl_s: float | None, key: str) -> None:
        box = self._live(paused=True)
        if box.calls.setdefault(key, call) != call:
            raise Conflict(f"key {key!r} was used for {box.calls[key]!r}: take a fresh key")
        if list(box.calls)[-1] == key:
            box.state, box.deadline = state, time.time() + (ttl_s or box.spec.ttl_s)

    async def snapshot(self, *, ttl_s: float = 3600.0, key: str | None = None) -> Snapshot:
        return self._sandboxes.keep(self._live(paused=True), ttl_s, key or uuid.uuid4().hex)

    @asynccontextmanager
    async def fork(self, *, key: str | None = None) -> AsyncIterator[InMemorySandbox]:
        key = key or uuid.uuid4().hex
        kept = await self.snapshot(key=key)
        spec = self.box.spec.model_copy(update={"snapshot": kept.id, "files": {}})
        try:
            async with self._sandboxes.acquire(spec, owner=self.box.owner, key=key) as fork:
                yield fork
        finally:
            await self._sandboxes.forget_snapshot(kept.id)

    async def close(self) -> None:
        self.box.end(SandboxState.CLOSED, "closed")

    def _live(self, *, paused: bool = False) -> Box:
        """The box, which takes commands, or may be paused."""
        self._sandboxes.expire()
        if self.box.state not in LIVE:
            raise SandboxLost(f"sandbox {self.id} is {self.box.state}: {self.box.cause}", ran=Ran.NO)
        if self.box.state is SandboxState.PAUSED and not paused:
            raise Conflict(f"sandbox {self.id} is PAUSED: resume it first")
        return self.box


class InMemorySandboxes:
    """The controller's double. `create_s` delays each creation, so that tests can cancel one."""

    def __init__(self, commands: Commands = shell, *, capacity: int = 512, create_s: float = 0.0) -> None:
        self.commands = commands
        self.boxes: dict[str, Box] = {}
        self._kept: dict[str, tuple[Snapshot, dict[str, bytes]]] = {}
        """Snapshots with their files."""
        self._snapshot_keys: dict[tuple[str, str], tuple[float, str]] = {}
        """Of each sandbox and key: what was asked for, and the snapshot."""
        self._capacity, self._create_s = capacity, create_s

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec, *, owner: str, key: str) -> AsyncIterator[InMemorySandbox]:
        await asyncio.sleep(self._create_s)
        sandbox = InMemorySandbox(self, self._create(spec, owner, key))
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _create(self, spec: SandboxSpec, owner: str, key: str) -> Box:
        self.expire()
        for box in self.boxes.values():
            if (box.owner, box.key) == (owner, key):
                if box.spec != spec:
                    raise Conflict(f"key {key!r} created sandbox {box.id} from another spec: take a fresh key")
                if box.state not in LIVE:
                    raise SandboxLost(f"key {key!r} names a sandbox that is {box.state}: take a fresh key", ran=Ran.NO)
                return box
        if len([box for box in self.boxes.values() if box.state in LIVE]) >= self._capacity:
            raise CapacityError(f"all {self._capacity} sandboxes are live", detail={"retry_after_s": 1.0})
        files = self._kept_files(spec.snapshot, owner)
        box = Box(
            id=f"sb-{uuid.uuid4().hex[:16]}", owner=owner, key=key, spec=spec, files=files,
            deadline=time.time() + spec.ttl_s,
        )  # fmt: skip
        box.files |= {box.path(path): text.encode() for path, text in spec.files.items()}
        self.boxes[box.id] = box
        return box

    def keep(self, box: Box, ttl_s: float, key: str) -> Snapshot:
        """A snapshot of a box; the same box and key give the same one."""
        now = time.time()
        asked, snapshot_id = self._snapshot_keys.setdefault((box.id, key), (ttl_s, f"snap-{uuid.uuid4().hex[:16]}"))
        if asked != ttl_s:
            raise Conflict(f"key {key!r} made snapshot {snapshot_id} from another request: take a fresh key")
        made = Snapshot(id=snapshot_id, owner=box.owner, sandbox=box.id, created_at=now, deadline=now + ttl_s)
        return self._kept.setdefault(snapshot_id, (made, dict(box.files)))[0]

    def _kept_files(self, snapshot_id: str, owner: str) -> dict[str, bytes]:
        if not snapshot_id:
            return {}
        if snapshot_id not in self._kept or self._kept[snapshot_id][0].owner != owner:
            raise NotFound(f"no snapshot {snapshot_id} of {owner}: it never was, or its time ended; nothing was made")
        return dict(self._kept[snapshot_id][1])

    async def snapshots(self, *, owner: str | None = None) -> Sequence[Snapshot]:
        self.expire()
        return tuple(kept for kept, _ in self._kept.values() if owner in (None, kept.owner))

    async def forget_snapshot(self, snapshot_id: str) -> None:
        self._kept.pop(snapshot_id, None)

    async def get(self, sandbox_id: str) -> InMemorySandbox:
        if sandbox_id not in self.boxes:
            raise NotFound(f"no sandbox {sandbox_id}")
        sandbox = InMemorySandbox(self, self.boxes[sandbox_id])
        sandbox._live(paused=True)
        return sandbox

    async def list(self, *, owner: str | None = None, live: bool = True) -> Sequence[SandboxView]:
        self.expire()
        return tuple(
            SandboxView(
                id=box.id, state=box.state, spec=box.spec, owner=box.owner,
                created_at=box.created_at, deadline=box.deadline, cause=box.cause,
            )
            for box in self.boxes.values()
            if (owner is None or box.owner == owner) and (box.state in LIVE or not live)
        )  # fmt: skip

    def lose(self, sandbox_id: str, cause: str) -> None:
        """Let a sandbox be lost, as when its node goes away."""
        self.boxes[sandbox_id].end(SandboxState.LOST, cause)

    def expire(self) -> None:
        """Close what outlived its lease; the double's sweep."""
        now = time.time()
        for box in self.boxes.values():
            if box.deadline <= now:
                box.end(SandboxState.CLOSED, "the lease ended")
        self._kept = {name: (kept, files) for name, (kept, files) in self._kept.items() if kept.deadline > now}
