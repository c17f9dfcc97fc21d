from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.advantages import EPSILON, grpo, rloo

rewards = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=16)


def test_grpo_by_hand() -> None:
    # mean 0.25, population std sqrt(3)/4
    std = 3**0.5 / 4
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75 / (std + EPSILON)] + [-0.25 / (std + EPSILON)] * 3)


def test_rloo_by_hand() -> None:
    # 3 - mean(1, 2), 1 - mean(3, 2), 2 - mean(3, 1)
    assert rloo([3.0, 1.0, 2.0]) == pytest.approx([1.5, -1.5, 0.0])


@given(rewards)
def test_both_match_numpy_and_sum_to_zero(values: list[float]) -> None:
    array = np.array(values)
    others = (array.sum() - array) / (len(array) - 1)
    assert rloo(values) == pytest.approx(list(array - others), abs=1e-9)
    if array.max() > array.min():
        assert grpo(values) == pytest.approx(list((array - array.mean()) / (array.std() + EPSILON)), abs=1e-6)
    assert sum(grpo(values)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("estimate", [grpo, rloo])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e9])
def test_equal_rewards_give_exactly_nothing(estimate: object, value: float) -> None:
    assert estimate([value] * 7) == (0.0,) * 7  # type: ignore[operator]


def test_a_single_attempt_has_no_baseline() -> None:
    assert grpo([1.0]) == rloo([1.0]) == (0.0,)
