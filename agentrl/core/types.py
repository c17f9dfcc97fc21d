"""The values that pass between rooms. Imported by every room; frozen, validated, and JSON on the wire.

Invariant: nothing here has behaviour beyond checking itself, and a value that exists is consistent
(a trajectory's arrays are of one length, a trained token has a logprob and a policy version).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.core.errors import AgentRLError, Blame, Ran


class Value(BaseModel):
    """Base of every wire type: immutable, unknown fields refused, bytes as base64 in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


# --- tasks and conversations -------------------------------------------------------------------


class Limits(Value):
    """What one episode may use."""

    turns: int = Field(8, gt=0)
    """Model calls of the agent's main line."""
    tokens: int = Field(4096, gt=0)
    """Longest prompt + completion, in tokens."""
    wall_s: float = Field(120.0, gt=0)
    """Seconds from dispatch to outcome."""


class Task(Value):
    """One problem of an environment."""

    env: str
    id: str
    source: str
    """Groups metrics, e.g. a data set's name."""
    data: Mapping[str, Any] = Field(default_factory=dict)
    """The environment's own JSON; what `Environment.tasks` put there."""
    limits: Limits = Limits()


class ToolCall(Value):
    id: str
    name: str
    arguments: Mapping[str, Any] | None
    """Parsed arguments; None when `raw` is not a JSON object."""
    raw: str
    """The argument string exactly as the model wrote it."""


class Message(Value):
    """One message of a transcript, in the Chat Completions vocabulary."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class Tool(Value):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolResult(Value):
    content: str
    done: bool = False
    """True ends the episode after this call."""


class Demonstration(Value):
    """A worked episode for the supervised warm start: messages as an agent would have produced them."""

    task: Task
    messages: tuple[Message, ...]


# --- sampling ----------------------------------------------------------------------------------


class Sampling(Value):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    """-1 means no limit."""
    max_tokens: int = Field(256, gt=0)
    """New tokens of one call."""


class VersionRun(Value):
    """Tokens [start, end) of one completion were sampled by policy `version`."""

    version: int
    start: int
    end: int


class GenerateRequest(Value):
    """One token-in, token-out call to an engine."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    session_id: str = ""
    """Sent as X-Session-ID: calls of one session share a prefix."""
    cache_salt: str = ""
    """Partitions the prefix cache; the gateway sends the policy version."""
    priority: int = 0


class Completion(Value):
    """What an engine sampled. `token_ids`, `logprobs` are of one length, which `versions` covers without gaps."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None
    versions: tuple[VersionRun, ...]
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = len(self.token_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"{n} token ids but {len(self.logprobs)} logprobs")
        if not all(math.isfinite(x) for x in self.logprobs):
            raise ValueError("a sampled token has a logprob that is not finite")
        at = 0
        for run in self.versions:
            if run.start != at or run.end < run.start:
                raise ValueError(f"version runs have a gap or overlap at token {at}")
            at = run.end
        if at != n:
            raise ValueError(f"version runs cover {at} of {n} tokens")
        return self


# --- sessions and trajectories -----------------------------------------------------------------


class SessionRequest(Value):
    task_id: str
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    calls: int = Field(1000, gt=0)
    """Most model calls of the session, side calls included."""


class SessionGrant(Value):
    id: str
    key: str
    """The unguessable capability; works in the path, as Bearer and as x-api-key."""
    base_url: str
    """OpenAI base URL of this session, with /v1."""


class Provenance(Value):
    """Where a trajectory's tokens came from. A record that lacks any of it is quarantined."""

    tokenizer: str
    """Fingerprint of the tokenizer's files."""
    renderer: str
    """Renderer name and a fingerprint of its arguments."""
    engine: str
    """Name and version of the engine."""
    sampling: Sampling


class Trajectory(Value):
    """A root-to-leaf token path of a session. All four arrays have one length, the path's tokens."""

    id: str
    session_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 on tokens to train on: sampled by the engine, in a call that counts."""
    behavior_logprobs: tuple[float | None, ...]
    """Natural log-probability at sampling; None where nothing was sampled."""
    policy_versions: tuple[int | None, ...]
    """The version that sampled the token; None where nothing was sampled."""
    finish: Literal["terminated", "truncated"]
    """`truncated`: the last call was cut by a limit."""
    session_tokens: int
    """Trained tokens of the whole session, so that splitting it never changes its weight."""
    provenance: Provenance

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = len(self.token_ids)
        lengths = (n, len(self.loss_mask), len(self.behavior_logprobs), len(self.policy_versions))
        if len(set(lengths)) != 1:
            raise ValueError(f"ids, mask, logprobs and versions have lengths {lengths}")
        rows = zip(self.loss_mask, self.behavior_logprobs, self.policy_versions, strict=True)
        for i, (mask, logprob, version) in enumerate(rows):
            if mask not in (0, 1):
                raise ValueError(f"loss mask at {i} is {mask}")
            if mask and (logprob is None or not math.isfinite(logprob) or version is None):
                raise ValueError(f"token {i} is trained but has logprob {logprob} and version {version}")
        return self


# --- outcomes ----------------------------------------------------------------------------------


class Scored(Value):
    """The verifier ran and priced the attempt. A reward of 0 is this, with reward=0.0."""

    kind: Literal["scored"] = "scored"
    reward: float = Field(allow_inf_nan=False)
    parts: Mapping[str, float] = Field(default_factory=dict)
    """The reward's components by name, for metrics."""
    verifier: str = ""
    """Version of the code that scored; filled in by the reward service."""


class Failed(Value):
    """No reward exists. Never turned into a number."""

    kind: Literal["failed"] = "failed"
    code: str
    blame: Blame = Blame.INFRA
    ran: Ran = Ran.MAYBE
    retryable: bool = False
    detail: str = ""
    verifier: str = ""

    @classmethod
    def of(cls, error: AgentRLError) -> Failed:
        return cls(code=error.code, blame=error.blame, ran=error.ran, retryable=error.retryable, detail=error.message)


Outcome = Annotated[Scored | Failed, Field(discriminator="kind")]


class Stop(StrEnum):
    """Why an attempt ended."""

    DONE = "done"
    """A tool said so."""
    ANSWERED = "answered"
    """The model answered without a tool call."""
    TURNS = "turns"
    TOKENS = "tokens"
    DEADLINE = "deadline"
    ERROR = "error"


class Attempt(Value):
    """What a verifier sees of an episode besides its sandbox."""

    stop: Stop
    turns: int
    """Model calls that the agent counted; 0 from an agent whose calls only the gateway sees."""
    transcript: tuple[Message, ...]
    detail: str = ""
    """Evidence of how it ended, e.g. a program's exit status and the end of its stderr."""


class ScoreRequest(Value):
    episode_id: str
    task: Task
    attempt: Attempt
    sandbox_id: str | None
    deadline_s: float = Field(30.0, gt=0)


class Timings(Value):
    """Where an episode's seconds went."""

    queue_s: float = 0.0
    sandbox_s: float = 0.0
    model_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0


class Episode(Value):
    """One finished attempt at a task, as the store keeps it."""

    id: str
    group_id: str
    index: int
    """Which of the group's attempts, 0 to G-1."""
    task: Task
    env_version: str
    session_id: str
    sandbox_id: str | None
    trajectories: tuple[Trajectory, ...]
    attempt: Attempt
    outcome: Outcome
    timings: Timings = Timings()


class Group(Value):
    """The accepted attempts at one task, ready to be trained on."""

    id: str
    task: Task
    size: int
    """G, the attempts that were asked for."""
    episodes: tuple[Episode, ...]
    """The accepted ones; infra failures are not among them."""


# --- sandboxes ---------------------------------------------------------------------------------


class SandboxLimits(Value):
    memory_mb: int = Field(512, gt=0)
    pids: int = Field(128, gt=0)
    cpus: float = Field(1.0, gt=0)
    disk_mb: int = Field(256, gt=0)


class SandboxSpec(Value):
    image: str = ""
    """Empty means the backend's default (on `local`: the host's own read-only root)."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Text files to write before READY; paths are relative to `workdir` or absolute."""
    workdir: str = "/work"
    env: Mapping[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    ttl_s: float = Field(300.0, gt=0)
    """Lease: seconds without renew or exec after which the sandbox is closed."""


class SandboxState(StrEnum):
    QUEUED = "QUEUED"
    CREATING = "CREATING"
    READY = "READY"
    PAUSED = "PAUSED"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"
    FAILED = "FAILED"
    LOST = "LOST"


class SandboxView(Value):
    """What the controller says about a sandbox."""

    id: str
    state: SandboxState
    spec: SandboxSpec
    owner: str
    """Tenant or run that asked for it."""
    created_at: float
    """Unix seconds."""
    deadline: float
    """Unix seconds at which the lease ends."""
    cause: str = ""
    """Evidence, in FAILED, LOST and CLOSED."""


class ExecRequest(Value):
    argv: tuple[str, ...] = Field(min_length=1)
    stdin: bytes = b""
    cwd: str = ""
    """Empty means the sandbox's workdir."""
    env: Mapping[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(30.0, gt=0)
    cap_bytes: int = Field(1 << 20, gt=0)
    """Most bytes kept of each stream: the first and last halves of the cap."""


class ExecResult(Value):
    """Exists only if the command ran."""

    status: Literal["EXITED", "SIGNALED", "TIMEOUT", "OOM"]
    exit_code: int | None = None
    """Set when EXITED."""
    signal: int | None = None
    """Set when SIGNALED, and for TIMEOUT and OOM the signal that ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    """Bytes written, of which `stdout` holds at most the cap."""
    stderr_total: int = 0
    duration_s: float = 0.0


# --- weights -----------------------------------------------------------------------------------


class TensorEntry(Value):
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


class Probe(Value):
    """A fixed prompt with the log-probabilities that the trainer computes for it under these weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of token_ids[1:], so one shorter."""
    tolerance: float
    """Largest |difference| that a replica may show."""


class WeightManifest(Value):
    """Describes one published policy version on disk."""

    version: int
    step: int
    kind: Literal["full"] = "full"
    file: str
    """Name of the safetensors file beside the manifest."""
    total_bytes: int
    tensors: tuple[TensorEntry, ...]
    probe: Probe
