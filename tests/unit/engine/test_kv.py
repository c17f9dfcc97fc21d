"""The rows' bookkeeping against a model of it: what a row claims to hold is what it holds, wherever it was moved."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.engine.kv import SLACK, KVCache
from agentrl.engine.sequence import Sequence

CONTEXT = 48
NEW = 8
TOKENS = st.builds(
    lambda base, shared, length: [0] * shared + [base] * length,
    st.integers(1, 2), st.integers(0, 25), st.integers(1, CONTEXT - NEW - 25),
)  # fmt: skip
"""Prompts of which many share a prefix that is worth something."""


def mark(tokens: list[int], salt: str) -> float:
    """What the model would have written for the last of `tokens`: it depends on all of them."""
    return float(hash((tuple(tokens), salt)) % 100_003)


class Rows(RuleBasedStateMachine):
    @initialize(rows=st.integers(2, 7))
    def build(self, rows: int) -> None:
        self.kv = KVCache(
            layers=2, heads=1, head_dim=1, rows=rows, context=CONTEXT, dtype=torch.float64, device="cpu"
        )  # fmt: skip
        self.most = rows
        self.running: list[Sequence] = []

    @precondition(lambda self: len(self.running) < self.most)
    @rule(tokens=TOKENS, salt=st.sampled_from(["a", "b"]), use_cache=st.booleans())
    def admit(self, tokens: list[int], salt: str, use_cache: bool) -> None:
        sequence = Sequence(id="s", prompt=tokens, max_new=NEW, salt=salt)
        if self.kv.admit(sequence, np.array(tokens), use_cache=use_cache):
            assert self.kv.valid[sequence.row] < len(tokens)
            self.running.append(sequence)
        else:
            assert any(self.kv.known[s.row] - self.kv.valid[s.row] > SLACK for s in self.running)

    @rule()
    def step(self) -> None:
        for sequence in self.running:
            row, held = sequence.row, sequence.prompt + sequence.token_ids
            for position in range(int(self.kv.valid[row]), len(held)):
                self.kv.data[:, :, row, :, position] = mark(held[: position + 1], sequence.salt)
            self.kv.valid[row] = len(held)
            if len(sequence.token_ids) < NEW:
                sequence.token_ids.append(len(held) % 3)
                self.kv.tokens[row, len(held)] = len(held) % 3
                self.kv.known[row] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.kv.release(sequence)

    @rule()
    def compact(self) -> None:
        self.kv.compact()
        assert self.kv.top - len(self.running) <= self.kv.top / 4

    @rule()
    def clear(self) -> None:
        self.kv.clear()

    @invariant()
    def rows_hold_what_they_claim(self) -> None:
        kv = self.kv
        for row in range(len(kv.owner)):
            tokens, length = kv.tokens[row].tolist(), int(kv.valid[row])
            expected = [mark(tokens[: position + 1], kv._salt[row]) for position in range(length)]
            for layer_and_kind in kv.data[:, :, row, 0, :length, 0].flatten(0, 1):
                assert layer_and_kind.tolist() == expected

    @invariant()
    def running_rows_are_in_the_slice_with_their_tokens(self) -> None:
        kv = self.kv
        assert sorted(s.row for s in self.running) == [r for r, owner in enumerate(kv.owner) if owner is not None]
        for sequence in self.running:
            assert kv.owner[sequence.row] is sequence
            assert sequence.row < kv.top
            held = sequence.prompt + sequence.token_ids
            assert kv.tokens[sequence.row, : len(held)].tolist() == held
            assert kv.known[sequence.row] == len(held)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
