"""One call in progress. Made by the server, changed only by the scheduler's thread, read again when finished.

Invariant: `token_ids`, `logprobs` and `ranks` are of one length, which `runs()` covers without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from agentrl.core.types import VersionRun

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False, slots=True)
class Sequence:
    id: str
    """Public id, with the prefix that aborts must name."""
    prompt: list[int]
    max_new: int
    """New tokens at most; already clamped to the context."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop_ids: frozenset[int] = frozenset()
    """The model's end tokens and the request's own."""
    end_ids: frozenset[int] = frozenset()
    """Those of `stop_ids` that are the model's: they report no stop_reason."""
    generator: torch.Generator | None = None
    """Draws this sequence's tokens; None: the scheduler's own does."""
    salt: str = ""
    priority: int = 0
    """Lower is earlier."""
    score_prompt: bool = False
    """Compute `prompt_logprobs`, for probes."""

    row: int = -1
    """Row of the KV cache; -1 while waiting and after the end."""
    cached: int = 0
    """Prompt tokens that the prefix cache supplied at first admission."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """1 is the most likely token."""
    prompt_logprobs: list[float] | None = None
    """Of prompt[1:]."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    _marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it samples)."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def plain(self) -> bool:
        """Whether it samples from the model's own distribution, with nothing to process."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0

    def mark(self, version: int) -> None:
        """Tokens from here on are sampled by `version`."""
        if self._marks and self._marks[-1][1] == len(self.token_ids):
            self._marks.pop()
        self._marks.append((version, len(self.token_ids)))

    def append(self, token: int, logprob: float, rank: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.ranks.append(rank)
        if token in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.end_ids else token
        elif len(self.token_ids) >= self.max_new:
            self.finish_reason = "length"

    def runs(self) -> tuple[VersionRun, ...]:
        """Which version sampled which tokens; none of a sequence that ended while it waited."""
        ends = [start for _, start in self._marks[1:]] + [len(self.token_ids)]
        pairs = zip(self._marks, ends, strict=False)
        return tuple(VersionRun(version=v, start=start, end=end) for (v, start), end in pairs if end > start)
