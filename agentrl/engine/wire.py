"""The JSON of vLLM's token-in, token-out API: the request as it is validated, the answers as they are written.

Used by the server. Invariant: a request that asks for what this engine does not do is refused, never half obeyed.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import orjson
import torch
from pydantic import BaseModel, ConfigDict, Field

from agentrl.core.errors import ContextOverflow, RequestError
from agentrl.engine.sequence import Sequence

ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the caller's request id."""


class SamplingParams(BaseModel):
    """The part of vLLM's SamplingParams that this engine serves; anything else is refused."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: Literal[0] | None = None
    """0: the sampled token's only."""
    prompt_logprobs: Literal[0] | None = None


class GenerateBody(BaseModel):
    request_id: str = ""
    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    stream: Literal[False] = False
    cache_salt: str = ""
    priority: int = 0


def to_sequence(body: GenerateBody, *, context: int, vocab_size: int, end_ids: frozenset[int]) -> Sequence:
    """The sequence to run. ContextOverflow when the prompt leaves no room; a too large max_tokens is cut down."""
    prompt, params = body.token_ids, body.sampling_params
    if len(prompt) >= context:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and this model's maximum context length is {context}: "
            "no token can be generated; shorten the conversation"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(f"token_ids must lie in [0, {vocab_size}), got {min(prompt)} to {max(prompt)}")
    ends = frozenset() if params.ignore_eos else end_ids
    return Sequence(
        id=ID_PREFIX + body.request_id, prompt=prompt, max_new=min(params.max_tokens, context - len(prompt)),
        temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0), end_ids=ends,
        stop_ids=ends | frozenset(params.stop_token_ids), salt=body.cache_salt, priority=body.priority,
        generator=_seeded(params.seed), score_prompt=params.prompt_logprobs is not None,
    )  # fmt: skip


def _seeded(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def response(sequence: Sequence, body: GenerateBody, model: str) -> bytes:
    return orjson.dumps(
        {
            "request_id": sequence.id,
            "created": int(time.time()),
            "model": model,
            "usage": _usage(sequence),
            "choices": [_choice(sequence, body)],
            "prompt_logprobs": _prompt_logprobs(sequence),
        }
    )


def _choice(sequence: Sequence, body: GenerateBody) -> dict[str, Any]:
    rows = zip(sequence.token_ids, sequence.logprobs, sequence.ranks, strict=True)
    content = [{"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in rows]
    runs = [{"version": str(run.version), "start": run.start, "end": run.end} for run in sequence.runs()]
    return {
        "index": 0,
        "logprobs": None if body.sampling_params.logprobs is None else {"content": content},
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.token_ids,
        "weight_versions": runs,
    }


def _usage(sequence: Sequence) -> dict[str, Any]:
    return {
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.token_ids),
        "total_tokens": sequence.length,
        "prompt_tokens_details": {"cached_tokens": sequence.cached},
    }


def _prompt_logprobs(sequence: Sequence) -> list[Any] | None:
    """vLLM's shape: null for the first token, then one entry a token under its id."""
    if sequence.prompt_logprobs is None:
        return None
    pairs = zip(sequence.prompt[1:], sequence.prompt_logprobs, strict=True)
    return [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]
