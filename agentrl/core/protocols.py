"""What one room may ask of another. Implemented by the rooms, by `agentrl.testing`'s doubles, and wired in `launch`.

Invariant: a room is constructed with these protocols and never with a neighbour's class.
Every method raises errors of `agentrl.core.errors`, and only those, for what it documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.core.types import (
    Attempt,
    Completion,
    ExecRequest,
    ExecResult,
    GenerateRequest,
    Group,
    Limits,
    Outcome,
    OutputChunk,
    ProcessRequest,
    ProcessView,
    SandboxSpec,
    SandboxView,
    ScoreRequest,
    SessionGrant,
    SessionRequest,
    Snapshot,
    Task,
    Trajectory,
    WeightManifest,
)

if TYPE_CHECKING:
    from agentrl.core.environment import Environment


# --- engine ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One replica's own view of itself."""

    name: str
    """Engine and version, e.g. `agentrl-engine/0.1` or `vllm/0.32.0`; goes into provenance."""
    version: int
    """The policy version it serves."""
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV memory in use, 0 to 1."""
    context: int
    """Longest prompt + completion, in tokens."""


class Engine(Protocol):
    """A client of one replica that speaks vLLM's HTTP API. Raises EngineError, ContextOverflow, ServiceUnavailable."""

    @property
    def url(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts it on the engine."""
        ...

    async def status(self) -> EngineStatus: ...

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of token_ids[1:] under the current weights; for probes."""
        ...

    async def pause(self) -> None:
        """Hold running requests where they are (mode keep) and clear the prefix cache."""
        ...

    async def resume(self) -> None: ...

    async def stage_weights(self, manifest_path: Path) -> None:
        """Load a published version beside the one that serves, and verify it against its manifest."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Swap the staged weights in; call between pause and resume."""
        ...


# --- gateway -----------------------------------------------------------------------------------


class Sessions(Protocol):
    """The gateway as rollout sees it. Raises GatewayError, NotFound, ServiceUnavailable."""

    async def open(self, request: SessionRequest) -> SessionGrant: ...

    async def seal(self, session_id: str) -> tuple[Trajectory, ...]:
        """Refuse new calls, drain, freeze, and export. Idempotent."""
        ...

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]: ...


class Pool(Protocol):
    """The gateway's replica table as the weight updater sees it."""

    async def set_replica(self, url: str, *, version: int, accepting: bool) -> None: ...


# --- sandboxes ---------------------------------------------------------------------------------


class Sandbox(Protocol):
    """A live sandbox. Raises SandboxError and its subclasses; ServiceUnavailable when the controller is away."""

    @property
    def id(self) -> str: ...

    async def exec(self, request: ExecRequest, *, key: str | None = None) -> ExecResult:
        """Run a command. `key` is the idempotency key; None makes a fresh one."""
        ...

    async def read(self, path: str) -> bytes:
        """A file's bytes. SandboxFileError when it is missing."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...

    async def renew(self, ttl_s: float) -> None: ...

    async def close(self) -> None:
        """Works in every state; idempotent."""
        ...


class ProcessSandbox(Sandbox, Protocol):
    """What a sandbox with real processes can do besides; `sandbox.client` gives such. Errors as for Sandbox."""

    async def start(self, request: ProcessRequest, *, key: str | None = None) -> ProcessView:
        """Start a process and return. A key starts one process, ever; it is the process's id."""
        ...

    async def process(self, process_id: str, *, wait_s: float = 0.0) -> ProcessView:
        """Its state, as soon as it ended or after `wait_s`."""
        ...

    async def output(
        self, process_id: str, *, stream: Literal["stdout", "stderr"] = "stdout", offset: int = 0, wait_s: float = 0.0
    ) -> OutputChunk:
        """What was written from `offset` on, as soon as there is some or after `wait_s`."""
        ...

    async def signal(self, process_id: str, number: int) -> ProcessView:
        """Signal its process group; KILL goes to everything that it started."""
        ...

    async def send_input(self, process_id: str, data: bytes, *, last: bool = False) -> ProcessView:
        """More stdin for an interactive process; `last` closes it. Conflict when it takes none any more."""
        ...

    async def read_range(self, path: str, offset: int, length: int) -> bytes: ...

    async def upload_tar(self, path: str, archive: bytes) -> None:
        """Unpack into a folder. Members that lead out of it are refused, as are hard links and devices."""
        ...

    async def download_tar(self, path: str) -> bytes: ...


class KeepableSandbox(Sandbox, Protocol):
    """A sandbox that can be paused and kept. Unsupported (nothing happened) where the backend cannot."""

    async def pause(self, *, ttl_s: float | None = None, key: str | None = None) -> None:
        """Freeze it until `resume`; meanwhile commands are a Conflict. Its lease goes on, for `ttl_s` if given."""
        ...

    async def resume(self, *, key: str | None = None) -> None: ...

    async def snapshot(self, *, ttl_s: float = 3600.0, key: str | None = None) -> Snapshot:
        """Keep its files, for `ttl_s`, so that others can begin from them with `SandboxSpec.snapshot`."""
        ...

    def fork(self, *, key: str | None = None) -> AbstractAsyncContextManager[KeepableSandbox]:
        """Another sandbox with the same spec and its files as they are now; closed on the way out."""
        ...


class Sandboxes(Protocol):
    """The controller, over HTTP or in process."""

    def acquire(self, spec: SandboxSpec, *, owner: str, key: str) -> AbstractAsyncContextManager[Sandbox]:
        """A READY sandbox for the duration of the block; closed on the way out, whatever happened.

        CapacityError at once when there is no room.
        """
        ...

    async def get(self, sandbox_id: str) -> Sandbox:
        """A handle to a live sandbox. NotFound, or SandboxLost with the cause, otherwise."""
        ...

    async def list(self, *, owner: str | None = None, live: bool = True) -> Sequence[SandboxView]: ...


# --- rewards -----------------------------------------------------------------------------------


class Rewards(Protocol):
    async def score(self, request: ScoreRequest) -> Outcome:
        """Never raises for what went wrong while scoring: that is a Failed with a code and blame."""
        ...


# --- agents ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent gets for one episode."""

    task: Task
    environment: Environment
    base_url: str
    api_key: str
    model: str
    limits: Limits
    sandbox: Sandbox | None


class Agent(Protocol):
    """A coroutine that plays one episode. Reused over episodes; holds no per-episode state."""

    async def run(self, context: AgentContext) -> Attempt:
        """Play until done or a limit. Raises what its tools raise; the episode classifies it."""
        ...

    async def close(self) -> None: ...


# --- training ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """What the trainer consumes in one step."""

    step: int
    groups: tuple[Group, ...]
    dropped_samples: int = 0
    """Samples that the staleness sweep took out since the last batch."""


class SampleSource(Protocol):
    """The durable buffer as the trainer sees it."""

    async def take(self, step: int, *, version: int, groups: int) -> Batch:
        """Wait for, sweep and claim the groups of `step`. Claims of steps after the last commit are void."""
        ...

    async def commit(self, step: int, *, version: int, checkpoint: str) -> None:
        """Make the claims of `step` final, together with the checkpoint that contains them."""
        ...

    async def rewind(self, step: int) -> None:
        """After a resume from the checkpoint of `step`: give back every claim of a later step."""
        ...

    async def publish_version(self, version: int, *, step: int, path: str) -> None:
        """Record that replicas serve `version`; admission counts from it."""
        ...

    async def latest_version(self) -> int:
        """The highest version ever published, -1 before the first."""
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """A version that serves."""

    urls: tuple[str, ...]
    """The replicas that serve it, verified."""
    samples: tuple[tuple[tuple[int, ...], Completion], ...]
    """For each, a prompt and what the replica sampled after it under the new version, for comparison."""


class Publisher(Protocol):
    async def apply(self, manifest: WeightManifest, path: Path) -> Applied:
        """Bring the replicas to the manifest's version.

        Raises WeightsError when no replica took it before the deadline.
        """
        ...


class MetricSink(Protocol):
    """Where a step's numbers go. A sink that fails never stops training."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
