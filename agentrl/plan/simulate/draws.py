"""Random lengths and durations for the simulator, by number instead of in turn.

Used by `replicas`. Invariant: the draw of a number is a function of the seed, the stream and the number alone, so that
a simulation that is run again, further, or in another order sees the same trajectories.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentrl.plan.workload import Lengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def draw(lengths: Lengths, seed: int, stream: int, numbers: Ints) -> Floats:
    """One value for each number."""
    if lengths.kind == "fixed" or lengths.mean == 0:
        return np.full(numbers.shape, lengths.mean)
    first = uniform(seed, 2 * stream, numbers)
    if lengths.kind == "empirical":
        values = _observed(lengths)
        found: Floats = values[(first * len(values)).astype(np.int64)]
        return found
    # Box-Muller: a normal from two uniforms.
    angle = uniform(seed, 2 * stream + 1, numbers) * (2 * math.pi)
    normal = np.sqrt(-2 * np.log(first)) * np.cos(angle)
    capped: Floats = np.minimum(np.exp(_location(lengths) + lengths.sigma * normal), lengths.limit)
    return capped


def uniform(seed: int, stream: int, numbers: Ints) -> Floats:
    """In (0, 1), one for each number (splitmix64 over a key made of seed and stream)."""
    bits = _mixed(numbers.astype(np.uint64) * _GOLDEN + _key(seed, stream))
    share: Floats = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return share


@lru_cache(maxsize=64)
def _key(seed: int, stream: int) -> np.uint64:
    return np.uint64(_mixed(np.array([(seed * 1_000_003 + stream) % 2**64], dtype=np.uint64))[0])


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))


@lru_cache(maxsize=64)
def _location(lengths: Lengths) -> float:
    return lengths.location


@lru_cache(maxsize=64)
def _observed(lengths: Lengths) -> Floats:
    values: Floats = np.minimum(np.asarray(lengths.values, dtype=np.float64), lengths.limit)
    return values
