"""Advantages of one group's attempts from their rewards. Called by `samples`; pure.

Invariant: a baseline is computed over scored attempts only, so a failure never shifts it, and a group
whose rewards are all equal gets advantages of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Estimator = Callable[[Sequence[float]], tuple[float, ...]]

EPSILON = 1e-6
"""Added to the standard deviation; rewards are of order 1."""


def grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """(R - mean) / (std + eps): Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.

    The standard deviation is the population's, in two passes, so that equal rewards give exactly 0.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if max(rewards) == min(rewards):
        return (0.0,) * len(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return tuple(c / (std + EPSILON) for c in centred)


def rloo(rewards: Sequence[float]) -> tuple[float, ...]:
    """R - mean of the others: Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740), equation 8."""
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return (0.0,) * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return tuple(reward - (total - reward) / others for reward in rewards)


ESTIMATORS: Mapping[Literal["grpo", "rloo"], Estimator] = {"grpo": grpo, "rloo": rloo}
