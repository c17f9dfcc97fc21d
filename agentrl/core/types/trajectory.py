"""Sessions and the token paths that they record."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.core.types.sampling import Sampling
from agentrl.core.types.task import Limits
from agentrl.core.types.value import Value


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
