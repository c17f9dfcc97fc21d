"""Continuous batching: which sequences compute what in the next step. Driven by the worker's thread alone.

A running sequence has tokens that are known and a row in which some of them are computed; a step computes more. One
token to go is decoding, more is prefill, so that a new call, a continued session and a recomputation after a weight
update are the same thing.

Invariant: every sampled token carries the version whose weights sampled it, and every sequence that was added is
returned by `step` or `abort` exactly once, with a finish reason.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
import torch

from agentrl.engine.model import ModelRunner
from agentrl.engine.sampler import sample
from agentrl.engine.sequence import Sequence

PREFILL_TOKENS = 4096
"""Prompt tokens computed between two decode steps, the earliest calls first."""


class Scheduler:
    def __init__(self, runner: ModelRunner, *, version: int, max_rows: int, seed: int | None = None) -> None:
        self.runner = runner
        self.version = version
        self.paused = False
        self.sampled = 0
        """Tokens sampled since the start."""
        self.computed = 0
        """Prompt tokens computed since the start, recomputation included."""
        self._max_rows = max_rows
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._running: list[Sequence] = []
        self._added = 0
        self._generator = torch.Generator(device=runner.kv.data.device)
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self.paused or not (self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._added += 1
        heapq.heappush(self._waiting, (sequence.priority, self._added, sequence))

    def abort(self, which: Callable[[Sequence], bool]) -> list[Sequence]:
        """End those sequences; returns the ones that were still going."""
        ended = [s for s in self._running if which(s)]
        for sequence in ended:
            self.runner.kv.release(sequence)
        queued = [s for _, _, s in self._waiting if which(s)]
        for sequence in ended + queued:
            sequence.finish_reason = "abort"
        self._running = [s for s in self._running if s.finish_reason is None]
        self._waiting = [entry for entry in self._waiting if entry[2].finish_reason is None]
        heapq.heapify(self._waiting)
        return ended + queued

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """New weights from the next step on. Running sequences go on, recomputed under them."""
        self.runner.install(weights)
        self.version = version
        for sequence in self._running:
            sequence.mark(version)

    def step(self) -> list[Sequence]:
        """Advance every running sequence that can be; returns those that ended."""
        self._admit()
        kv = self.runner.kv
        kv.compact()
        for batch in self._prefill_batches():
            ends = [end for _, end in batch]
            self.computed += sum(end - int(kv.valid[s.row]) for s, end in batch)
            logits = self.runner.prefill([s.row for s, _ in batch], ends)
            whole = [i for i, (s, end) in enumerate(batch) if end == s.length]
            if whole:
                self._sample(logits[whole], [batch[i][0] for i in whole])
        remaining = kv.known[: kv.top] - kv.valid[: kv.top]
        ready = [owner if left == 1 else None for owner, left in zip(kv.owner, remaining, strict=False)]
        ready = [s if s is not None and s.finish_reason is None else None for s in ready]
        if any(ready):
            logits = self.runner.decode()
            kv.valid[[s.row for s in ready if s is not None]] += 1
            self._sample(logits, ready)
        return self._ended()

    def _admit(self) -> None:
        deferred = []
        while self._waiting and len(self._running) < self._max_rows:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            if sequence.score_prompt and sequence.prompt_logprobs is None:
                sequence.prompt_logprobs = self.runner.score(sequence.prompt)
            tokens = np.array(sequence.prompt)
            if not self.runner.kv.admit(sequence, tokens, use_cache=not sequence.score_prompt):
                deferred.append(entry)
                continue
            sequence.cached = int(self.runner.kv.valid[sequence.row])
            sequence.mark(self.version)
            self._running.append(sequence)
        for entry in deferred:
            heapq.heappush(self._waiting, entry)

    def _prefill_batches(self) -> list[list[tuple[Sequence, int]]]:
        """What to prefill in this step: (sequence, position to reach), batched by similar length to pad little."""
        chosen: list[tuple[int, Sequence, int]] = []
        budget = PREFILL_TOKENS
        for sequence in self._running:
            computed = int(self.runner.kv.valid[sequence.row])
            take = min(sequence.length - computed, budget)
            if sequence.length - computed > 1 and take > 0:
                chosen.append((take, sequence, computed + take))
                budget -= take
        batches: list[list[tuple[Sequence, int]]] = []
        width = 0
        for take, sequence, end in sorted(chosen, key=lambda choice: -choice[0]):
            if not batches or take * 2 < width:
                batches.append([])
                width = take
            batches[-1].append((sequence, end))
        return batches

    def _sample(self, logits: torch.Tensor, rows: list[Sequence | None] | list[Sequence]) -> None:
        tokens, logprobs, ranks = sample(logits, rows, self._generator)
        kv = self.runner.kv
        grown, drawn = [], []
        for sequence, token, logprob, rank in zip(rows, tokens, logprobs, ranks, strict=True):
            if sequence is not None:
                sequence.append(token, logprob, rank)
                grown.append(sequence.row)
                drawn.append(token)
        kv.tokens[grown, kv.known[grown]] = drawn
        kv.known[grown] += 1
        self.sampled += len(grown)

    def _ended(self) -> list[Sequence]:
        ended = [s for s in self._running if s.finish_reason is not None]
        if ended:
            for sequence in ended:
                self.runner.kv.release(sequence)
            self._running = [s for s in self._running if s.finish_reason is None]
        return ended
