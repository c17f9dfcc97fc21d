"""agentrl: reinforcement learning for LLM agents, inside their harness, tools and sandboxes.

These are the names that a plugin author needs; everything else lives in its room.
"""

from agentrl.core.environment import Environment, Split
from agentrl.core.errors import AgentRLError, Blame, Ran, SandboxFileError
from agentrl.core.protocols import Agent, AgentContext, Sandbox
from agentrl.core.types import (
    Attempt,
    Demonstration,
    ExecRequest,
    ExecResult,
    Failed,
    Limits,
    Message,
    SandboxSpec,
    Scored,
    Stop,
    Task,
    Tool,
    ToolCall,
    ToolResult,
)

__all__ = [
    "Agent",
    "AgentContext",
    "AgentRLError",
    "Attempt",
    "Blame",
    "Demonstration",
    "Environment",
    "ExecRequest",
    "ExecResult",
    "Failed",
    "Limits",
    "Message",
    "Ran",
    "Sandbox",
    "SandboxFileError",
    "SandboxSpec",
    "Scored",
    "Split",
    "Stop",
    "Task",
    "Tool",
    "ToolCall",
    "ToolResult",
]
