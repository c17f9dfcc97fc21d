"""Draws one token a row and says how likely it was. Used by the scheduler.

Invariant: the log-probability is that of the distribution drawn from, after temperature, top-k and top-p. Greedy rows
(temperature 0) report the model's own distribution, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from agentrl.engine.sequence import Sequence


def sample(
    logits: torch.Tensor, rows: Rows[Sequence | None], generator: torch.Generator
) -> tuple[list[int], list[float], list[int]]:
    """Token, natural log-probability and rank for each row of `logits` [rows, vocab]; None rows are drawn in vain."""
    logits = logits.float()
    busy = [sequence for sequence in rows if sequence is not None]
    if not all(sequence.plain for sequence in busy):
        logits = _process(logits, rows)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _draw(logprobs, _uniform(rows, generator, logprobs.device))
    greedy = [i for i, sequence in enumerate(rows) if sequence is not None and sequence.temperature == 0]
    if greedy:
        tokens[greedy] = logprobs[greedy].argmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    return tokens.tolist(), chosen[:, 0].tolist(), ranks.tolist()


def _uniform(rows: Rows[Sequence | None], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A number in [0, 1) for each row, from the row's own generator where it has one."""
    uniform = torch.rand(len(rows), 1, dtype=torch.float64, generator=generator, device=device)
    for i, sequence in enumerate(rows):
        if sequence is not None and sequence.generator is not None:
            uniform[i] = torch.rand(1, dtype=torch.float64, generator=sequence.generator)
    return uniform


def _draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution at one uniform number a row; a token of probability 0 is never drawn."""
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    tokens = torch.searchsorted(cumulative, uniform.mul_(cumulative[:, -1:]), right=True)
    return tokens[:, 0].clamp_(max=logprobs.shape[-1] - 1)


def _process(logits: torch.Tensor, rows: Rows[Sequence | None]) -> torch.Tensor:
    """Temperature, then top-k, then top-p; a row without an owner is left as it is."""
    device, vocab = logits.device, logits.shape[-1]
    temperature = torch.tensor([1.0 if s is None or s.temperature == 0 else s.temperature for s in rows], device=device)
    logits = logits / temperature[:, None]
    if all(s is None or (s.top_p == 1.0 and s.top_k == 0) for s in rows):
        return logits
    top_k = torch.tensor([vocab if s is None or not s.top_k else min(s.top_k, vocab) for s in rows], device=device)
    top_p = torch.tensor([1.0 if s is None else s.top_p for s in rows], device=device)
    ordered, order = logits.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(vocab, device=device) >= top_k[:, None], -torch.inf)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1.0), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ordered)
