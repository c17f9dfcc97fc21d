"""Attempts, their outcomes, and the groups they form."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from agentrl.core.errors import AgentRLError, Blame, Ran
from agentrl.core.types.task import Message, Task
from agentrl.core.types.trajectory import Trajectory
from agentrl.core.types.value import Value


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
