"""How many versions behind a sample will be, by its length. Called by `options` and the report.

A sample is trained when its whole group is there. If its group takes x intervals between two syncs, from any point of
one with equal chance, it meets x syncs on average: floor(x), or one more if it began late. A trainer with GPUs of its
own takes it when it has done with the batch before, which is up to a version later; where it shares them, at once.
Invariant: lag grows with length, so that whatever a limit drops is longer than what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.ledger import Rollout
from agentrl.plan.workload import Lengths, Workload

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Of lengths, that a table shows."""
POINTS, MATES = 400, 40
"""Values of equal share that stand for a distribution of lengths, and for that of the longest other of a group."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LengthLag:
    """What becomes of the responses of one length."""

    tokens: float
    mean_lag: float
    dropped: float
    """Share of them that the limit drops, if there is one."""


@dataclass(frozen=True)
class Cut:
    """What a drop limit takes away."""

    dropped_share: Figure
    """Of the samples."""
    dropped_token_share: Figure
    kept_mean_tokens: Figure
    """Mean length of what is trained on; generated is longer, which is the bias of dropping by lag."""
    length_bias: Figure
    """kept mean / generated mean: 1 without bias."""


@dataclass(frozen=True)
class Staleness:
    """The lags of a workload whose weights are synced every `interval_s`."""

    mean_lag: Figure
    lag_p10: Figure
    """Of a response whose length 10 % of all do not exceed; then the median, and so on."""
    lag_p50: Figure
    lag_p90: Figure
    lag_p99: Figure
    lag_shares: tuple[float, ...]
    """Share of the samples with lag 0, 1, 2, ..."""
    by_length: tuple[LengthLag, ...]
    cut: Cut | None
    """None where no limit applies."""


ONE_VERSION = Input("taken_after", 1, "versions", "the trainer is always busy")
ANY_TIME = Input("begins_within", 1, "share", "at any moment of an interval")


def typical_lag(generation_s: Quantity, wait_s: Quantity, interval_s: Quantity) -> Figure:
    """Whole sync intervals between the start of a response and the trainer's use of it."""
    return Figure(
        "typical_lag",
        math.floor((generation_s.value + wait_s.value) / interval_s.value),
        "versions",
        f"floor(({generation_s.name} + {wait_s.name}) / {interval_s.name})",
        (generation_s, wait_s, interval_s),
    )


def episode_lengths(work: Workload) -> Lengths:
    """Sampled tokens of whole episodes: one turn's, or a lognormal with the mean and variance of all turns' sum."""
    turn, turns = work.response_tokens, work.turns
    if turns == 1 or turn.kind == "fixed" or turn.mean == 0:
        return turn if turns == 1 else Lengths(mean=turns * turn.mean)
    sigma = math.sqrt(math.log1p(turn.variance / (turns * turn.mean**2)))
    return Lengths(kind="lognormal", mean=turns * turn.mean, sigma=sigma)


def beside_tokens(rollout: Rollout, share: Quantity) -> Figure:
    """What a sample takes besides its tokens until its group is done: environment, and waits as the pool fills."""
    work = rollout.plan.workload
    slowest = work.environment_s.longest_sum(work.turns, work.samples)
    environment = Input("group_environment_s", slowest, "s", "[workload] 1 - 1/samples quantile")
    waits, value = rollout.waits, environment.value + rollout.waits.value * share.value
    formula = f"{environment.name} + {waits.name} x {share.name}"
    return Figure("beside_tokens_s", value, "s", formula, (environment, waits, share))


def staleness(
    lengths: Lengths,
    token_s: Quantity,
    other_s: Quantity,
    interval_s: Quantity,
    limit: int | None,
    taken_after: Quantity = ONE_VERSION,
    group: int = 1,
    begins: Quantity = ANY_TIME,
) -> Staleness:
    """Lags over a distribution of lengths, for groups of `group` samples that start together.

    `other_s` is what a sample takes besides its tokens; `taken_after` the versions between its group's end and its
    training; `begins` the part of an interval, from its start, in which samples begin. `limit` None drops nothing.
    """
    tokens, longest = group_lengths(lengths, group)
    lags = (longest * token_s.value + other_s.value) / interval_s.value + taken_after.value
    over = np.zeros_like(lags) if limit is None else over_limit(lags, limit, begins.value)
    means, dropped = lags.mean(axis=1), over.mean(axis=1)
    inputs = (token_s, other_s, interval_s, Input("group_size", group, source="[workload]"), taken_after)
    lag = f"(longest of the group x {token_s.name} + {other_s.name}) / {interval_s.name} + {taken_after.name}"
    by_length = tuple(
        LengthLag(float(tokens[at]), float(means[at]), float(dropped[at]))
        for at in (int(share * (POINTS - 1)) for share in QUANTILES)
    )
    shown = [
        Figure(f"lag_p{100 * share:g}", row.mean_lag, "versions", f"{lag} at {row.tokens:,.0f} tokens", inputs)
        for share, row in zip(QUANTILES, by_length, strict=True)
    ]
    words = f"share with a lag over max_lag = {limit}, if at_limit = 'drop'; lag: {lag}"
    return Staleness(
        mean_lag=Figure("mean_lag", float(means.mean()), "versions", f"mean of {lag}", inputs),
        lag_p10=shown[0],
        lag_p50=shown[2],
        lag_p90=shown[4],
        lag_p99=shown[5],
        lag_shares=lag_shares(lags.ravel().tolist()),
        by_length=by_length,
        cut=None if limit is None else _cut(tokens, dropped, words, (*inputs, begins)),
    )


@lru_cache(maxsize=16)
def group_lengths(lengths: Lengths, group: int) -> tuple[Floats, Floats]:
    """Lengths of equal share; and for each, in a row, the longest of its group."""
    shares = (np.arange(POINTS) + 0.5) / POINTS
    tokens = np.array([lengths.quantile(float(share)) for share in shares])
    if group == 1:
        return tokens, tokens[:, None]
    mates = [lengths.quantile(((at + 0.5) / MATES) ** (1 / (group - 1))) for at in range(MATES)]
    return tokens, np.maximum(tokens[:, None], np.array(mates))


def _cut(tokens: Floats, dropped: Floats, words: str, inputs: tuple[Quantity, ...]) -> Cut:
    kept_tokens, generated, kept_share = (
        float(((1 - dropped) * tokens).mean()),
        float(tokens.mean()),
        1 - dropped.mean(),
    )
    mean = kept_tokens / float(kept_share) if kept_share else 0.0
    kept = Figure("kept_mean_tokens", mean, "tokens", "mean length of what is kept", inputs)
    token_share = 1 - kept_tokens / generated if generated else 0.0
    bias, formula = mean / generated if generated else 1.0, f"{kept.name} / mean length of what is generated"
    return Cut(
        dropped_share=Figure("dropped_share", float(dropped.mean()), "share", words, inputs),
        dropped_token_share=Figure("dropped_token_share", token_share, "share", f"by tokens, {words}", inputs),
        kept_mean_tokens=kept,
        length_bias=Figure("length_bias", bias, "", formula, (kept,)),
    )


def over_limit(mean_lags: Floats, limit: int, begins: float = 1.0) -> Floats:
    """Chance that samples of these mean lags lag more than `limit`, over all starts in a first part of an interval.

    A sample that begins at u lags floor(u + its mean lag).
    """
    over: Floats = np.clip((mean_lags - limit - (1 - begins)) / max(begins, 1e-9), 0.0, 1.0)
    return over


def lag_shares(mean_lags: Sequence[float]) -> tuple[float, ...]:
    """Share of the samples with each whole lag from 0, for equally likely samples of these mean lags."""
    shares = [0.0] * (math.floor(max(mean_lags)) + 2)
    for mean in mean_lags:
        whole = math.floor(mean)
        shares[whole] += (1 - (mean - whole)) / len(mean_lags)
        shares[whole + 1] += (mean - whole) / len(mean_lags)
    while len(shares) > 1 and shares[-1] == 0:
        shares.pop()
    return tuple(shares)
