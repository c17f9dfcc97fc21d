from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.sampler import sample
from agentrl.engine.sequence import Sequence

ROWS = 20000


def seq(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sequence:
    return Sequence(id="s", prompt=[0], max_new=1, temperature=temperature, top_p=top_p, top_k=top_k)


def expected(logits: list[float], sequence: Sequence) -> list[float]:
    """The processed distribution, written as its definition."""
    scaled = [x / (sequence.temperature or 1.0) for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sequence.top_k or len(order)]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= sequence.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("sequence", [seq(), seq(0.5), seq(2.0), seq(top_k=2), seq(top_p=0.7), seq(1.5, 0.8, 3)])
def test_draws_and_logprobs_follow_the_processed_distribution(sequence: Sequence) -> None:
    logits = [0.3, -1.2, 2.0, 0.9, -0.4]
    want = expected(logits, sequence)
    generator = torch.Generator().manual_seed(7)
    tokens, logprobs, ranks = sample(torch.tensor([logits] * ROWS), [sequence] * ROWS, generator)
    for token, probability in enumerate(want):
        share = tokens.count(token) / ROWS
        assert share == pytest.approx(probability, abs=4 * math.sqrt(0.25 / ROWS))
        assert (share == 0) == (probability == 0)
    for token, logprob, rank in list(zip(tokens, logprobs, ranks, strict=True))[:200]:
        assert math.exp(logprob) == pytest.approx(want[token], rel=1e-5)
        assert rank == 1 + sum(p > want[token] for p in want)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.5, 1.0]), st.sampled_from([0, 1, 3])),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_rows_do_not_influence_each_other(settings_of_rows: list[tuple[float, float, int]], seed: int) -> None:
    logits = torch.randn(len(settings_of_rows), 11, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [seq(*values) for values in settings_of_rows]
    tokens, logprobs, _ = sample(logits, rows, torch.Generator().manual_seed(seed))
    for row, sequence in enumerate(rows):
        if sequence.temperature == 0:
            assert tokens[row] == int(logits[row].argmax())
        if sequence.plain:
            raw = torch.log_softmax(logits[row], dim=-1)[tokens[row]].item()
            assert logprobs[row] == pytest.approx(raw, abs=1e-6)
        else:
            assert math.exp(logprobs[row]) == pytest.approx(
                expected(logits[row].tolist(), sequence)[tokens[row]], rel=1e-4
            )


def test_rows_without_owner_are_drawn_in_vain() -> None:
    tokens, logprobs, ranks = sample(torch.zeros(3, 4), [None, seq(), None], torch.Generator().manual_seed(0))
    assert len(tokens) == len(logprobs) == len(ranks) == 3


def test_a_row_with_its_own_generator_draws_the_same_in_any_company() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))

    def drawn(seed: int | None, company: int, shared: int) -> list[int]:
        own = None if seed is None else torch.Generator().manual_seed(seed)
        rows = [Sequence(id=str(i), prompt=[1], max_new=9) for i in range(company)]
        rows.append(Sequence(id="own", prompt=[1], max_new=9, generator=own))
        generator = torch.Generator().manual_seed(shared)
        return [sample(logits.expand(len(rows), -1), rows, generator)[0][-1] for _ in range(20)]

    assert drawn(7, 0, 1) == drawn(7, 3, 2)
    assert drawn(7, 0, 1) != drawn(8, 0, 1)
    assert drawn(None, 0, 1) != drawn(None, 0, 2)
