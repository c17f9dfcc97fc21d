"""Arranges sequences into packs: tensors of one forward pass. Called by `trainer` and `warm_start`; pure.

Several sequences share a row; position ids restart at each, by which Hugging Face models separate their
attention. Invariant: every sequence is in exactly one pack, and its trained tokens keep their order, so the
pack's per-token arrays are its members' arrays joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids and which of them are trained on."""

    token_ids: Tensor
    """int64 [T]"""
    targets: Tensor
    """int64 [n]: positions of the trained tokens, ascending, each at least 1."""
    temperature: float = 1.0
    """Of the sampling; logits are divided by it."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass."""

    members: tuple[int, ...]
    """Indices into the sequences given to `pack`, in the order of the arrays below."""
    token_ids: Tensor
    """int64 [rows, length]"""
    position_ids: Tensor
    """int64 [rows, length]; 0 where a sequence starts."""
    sources: Tensor
    """int64 [N]: flat index (row * length + column) whose logits predict each trained token."""
    target_ids: Tensor
    """int64 [N]: the trained tokens."""
    temperatures: Tensor
    """fp32 [N]"""


def arrange(lengths: Sequence[int], budget: int, *, share_rows: bool = True) -> list[list[list[int]]]:
    """Packs of rows of indices, by first fit over descending lengths.

    A pack's rows are as long as its longest sequence, and rows x length stays within `budget` tokens; a longer
    sequence gets a pack of its own. Sorting keeps sequences of like length together, which cuts waste.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packs: list[list[list[int]]] = []
    while order:
        width = lengths[order[0]]
        most = max(1, budget // width)
        rows: list[list[int]] = []
        room: list[int] = []
        later: list[int] = []
        for i in order:
            fit = next((r for r, free in enumerate(room) if share_rows and free >= lengths[i]), None)
            if fit is not None:
                rows[fit].append(i)
                room[fit] -= lengths[i]
            elif len(rows) < most:
                rows.append([i])
                room.append(width - lengths[i])
            else:
                later.append(i)
        packs.append(rows)
        order = later
    return packs


def pack(sequences: Sequence[TokenSequence], budget: int, *, pad_id: int = 0, share_rows: bool = True) -> list[Pack]:
    """The sequences as packs of at most `budget` tokens, padding included."""
    lengths = [len(s.token_ids) for s in sequences]
    return [_build(sequences, rows, pad_id) for rows in arrange(lengths, budget, share_rows=share_rows)]


def _build(sequences: Sequence[TokenSequence], rows: list[list[int]], pad_id: int) -> Pack:
    width = max(sum(len(sequences[i].token_ids) for i in row) for row in rows)
    token_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    # Padding continues the last sequence's positions: under causal attention nothing before it changes, and a row
    # of one sequence needs no mask at all.
    position_ids = torch.arange(width).repeat(len(rows), 1)
    members, sources, target_ids, temperatures = [], [], [], []
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            sequence = sequences[i]
            end = start + len(sequence.token_ids)
            token_ids[r, start:end] = sequence.token_ids
            position_ids[r, start:] = torch.arange(width - start)
            members.append(i)
            sources.append(r * width + start + sequence.targets - 1)
            target_ids.append(sequence.token_ids[sequence.targets])
            temperatures.append(torch.full((len(sequence.targets),), sequence.temperature))
            start = end
    return Pack(
        members=tuple(members),
        token_ids=token_ids,
        position_ids=position_ids,
        sources=torch.cat(sources),
        target_ids=torch.cat(target_ids),
        temperatures=torch.cat(temperatures),
    )
