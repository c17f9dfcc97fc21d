"""The values that pass between rooms. Imported by every room; frozen, validated, and JSON on the wire.

Invariant: nothing here has behaviour beyond checking itself, and a value that exists is consistent
(a trajectory's arrays are of one length, a trained token has a logprob and a policy version).
"""

from agentrl.core.types.episode import Attempt, Episode, Failed, Group, Outcome, Scored, ScoreRequest, Stop, Timings
from agentrl.core.types.sampling import Completion, GenerateRequest, Sampling, VersionRun
from agentrl.core.types.sandbox import (
    ExecRequest,
    ExecResult,
    OutputChunk,
    ProcessRequest,
    ProcessView,
    SandboxLimits,
    SandboxSpec,
    SandboxState,
    SandboxView,
    Snapshot,
    TerminalSize,
)
from agentrl.core.types.task import Demonstration, Limits, Message, Task, Tool, ToolCall, ToolResult
from agentrl.core.types.trajectory import Provenance, SessionGrant, SessionRequest, Trajectory
from agentrl.core.types.value import Value
from agentrl.core.types.weights import Probe, TensorEntry, WeightManifest

__all__ = [
    "Attempt",
    "Completion",
    "Demonstration",
    "Episode",
    "ExecRequest",
    "ExecResult",
    "Failed",
    "GenerateRequest",
    "Group",
    "Limits",
    "Message",
    "Outcome",
    "OutputChunk",
    "Probe",
    "ProcessRequest",
    "ProcessView",
    "Provenance",
    "Sampling",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxState",
    "SandboxView",
    "ScoreRequest",
    "Scored",
    "SessionGrant",
    "SessionRequest",
    "Snapshot",
    "Stop",
    "Task",
    "TensorEntry",
    "TerminalSize",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Value",
    "VersionRun",
    "WeightManifest",
]
