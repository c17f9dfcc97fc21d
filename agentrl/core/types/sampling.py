"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.core.types.value import Value


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
    seed: int | None = None
    """Repeats the draws of an earlier call with the same seed, as far as the engine's arithmetic does."""
    json_schema: str = ""
    """JSON text of a schema that the completion has to match; an engine that cannot see to that refuses the call."""


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
