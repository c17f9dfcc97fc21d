from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.train import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def ppo_reference(current: float, proximal: float, advantage: float) -> float:
    """The formula of facts/losses.md, token by token."""
    ratio = math.exp(current - proximal)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
    return min(loss, 3.0 * abs(advantage)) if advantage < 0 else loss


@given(
    st.lists(
        st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=20
    )
)  # fmt: skip
def test_ppo_matches_the_formula(rows: list[tuple[float, float, float]]) -> None:
    current, proximal, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    got = losses.ppo_clip(current, proximal, advantages, **CLIP).losses
    assert got.tolist() == pytest.approx([ppo_reference(*row) for row in rows], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient", "clipped", "dual"),
    [
        (0.0, 1.0, -1.0, -1.0, False, False),
        (math.log(1.5), 1.0, -1.28, 0.0, True, False),  # clip-higher
        (math.log(0.5), 1.0, -0.5, -0.5, False, False),  # below the range a positive advantage still pulls back
        (math.log(0.5), -1.0, 0.8, 0.0, True, False),
        (math.log(2.0), -1.0, 2.0, 2.0, False, False),
        (math.log(4.0), -1.0, 3.0, 0.0, False, True),  # dual clip
    ],
)
def test_ppo_by_hand(
    log_ratio: float, advantage: float, loss: float, gradient: float, clipped: bool, dual: bool
) -> None:
    current = torch.tensor([log_ratio], requires_grad=True)
    found = losses.ppo_clip(current, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    found.losses.sum().backward()
    assert current.grad is not None
    assert found.losses.item() == pytest.approx(loss, rel=1e-6)
    assert current.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert (found.clipped.item(), found.dual_clipped.item()) == (clipped, dual)


def test_ppo_gradient_matches_finite_differences() -> None:
    torch.manual_seed(0)
    proximal, advantages = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    current = (proximal + 0.5 * torch.randn(64, dtype=torch.float64)).requires_grad_()

    def total(x: Tensor) -> Tensor:
        return losses.ppo_clip(x, proximal, advantages, **CLIP).losses

    assert torch.autograd.gradcheck(total, (current,), eps=1e-7)


def test_token_tis_by_hand() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0, 0.0, -math.inf, math.nan])
    behavior = torch.tensor([-1.0, -1.5, -3.0, -100.0, -1.0, -1.0])
    weights, finite = losses.token_tis(proximal, behavior, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.5), 2.0, 2.0, 1.0, 1.0])
    assert finite.tolist() == [True, True, True, True, False, False]


def test_tis_carries_no_gradient() -> None:
    proximal = torch.zeros(3, requires_grad=True)
    assert not losses.token_tis(proximal, torch.zeros(3), cap=2.0)[0].requires_grad


def test_loglinear_proximal_by_hand() -> None:
    current, behavior = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -2.0)
    # Version 7 is being produced: lags 0, 1, 2, 9 of the sampling versions.
    versions = torch.tensor([6, 5, 4, -3])
    found = losses.loglinear_proximal(current, behavior, versions, produced=7)
    assert found.tolist() == pytest.approx([-2.0, -1.5, -2 + 2 / 3, -1.1])
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [1 / 6] * 6),
        ("sequence", [1 / 2 / 2] * 2 + [1 / 4 / 2] * 4),
        ("constant", [1 / (2 * 10)] * 6),
    ],
)
def test_token_weights_by_hand(kind: str, expected: list[float]) -> None:
    # One session of two trained tokens and one of four.
    sessions = torch.tensor([2, 2, 4, 4, 4, 4])
    assert losses.token_weights(kind, sessions, constant_tokens=10).tolist() == pytest.approx(expected)  # type: ignore[arg-type]


def test_splitting_a_session_does_not_change_its_weight() -> None:
    whole = losses.token_weights("sequence", torch.tensor([6] * 6 + [3] * 3), constant_tokens=1)
    assert whole[:6].sum().item() == pytest.approx(0.5)


def test_rejected_values_reach_neither_loss_nor_gradient() -> None:
    current = torch.tensor([-1.0, -math.inf, math.nan], requires_grad=True)
    found = losses.ppo_clip(current, torch.full((3,), -1.0), torch.ones(3), **CLIP)
    total = losses.weighted_sum(found.losses, torch.full((3,), 1 / 3), found.finite)
    total.backward()
    assert total.item() == pytest.approx(-1 / 3)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1 / 3, 0.0, 0.0])


def test_normaliser_counts_what_was_rejected() -> None:
    weights = losses.token_weights("token", torch.tensor([4] * 4), constant_tokens=1)
    kept = torch.tensor([True, True, False, False])
    assert losses.weighted_sum(torch.ones(4), weights, kept).item() == pytest.approx(0.5)


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=50))
def test_effective_sample_size_matches_numpy(values: list[float]) -> None:
    w = np.array(values)
    expected = w.sum() ** 2 / (w**2).sum() / len(w)
    found = losses.effective_sample_size(torch.tensor(values, dtype=torch.float64))
    assert found == pytest.approx(expected)
    assert 0 < found <= 1 + 1e-9


def test_chi_squared_by_hand() -> None:
    assert losses.chi_squared(torch.tensor([0.0, 0.0])) == pytest.approx(0.0)
    assert losses.chi_squared(torch.tensor([math.log(2.0), math.log(0.5)])) == pytest.approx((4 + 0.25) / 2 - 1)
