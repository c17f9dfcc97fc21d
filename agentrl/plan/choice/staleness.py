"""How many versions behind a sample will be, by its length. Called by `choose` and the report.

A response that takes x intervals between two weight syncs (with its wait in the buffer) meets floor(x) of them, or one
more when it starts late in its interval; it starts at any point of one with equal chance. Invariant: lag grows with
length, so that whatever a limit drops is longer than what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.workload import Lengths, Workload

POINTS = 2000
"""Lengths of equal share that stand for a distribution."""


@dataclass(frozen=True)
class LengthLag:
    """What becomes of the responses of one length."""

    tokens: float
    spanned: float
    """Sync intervals between the first token and the trainer; also the mean lag."""
    dropped: float
    """Share of them that the limit drops."""


@dataclass(frozen=True)
class Staleness:
    """The lags of a workload whose weights are synced every `interval_s`."""

    mean_lag: Figure
    lag_shares: tuple[float, ...]
    """Share of the samples with lag 0, 1, 2, ..."""
    by_length: tuple[LengthLag, ...]
    dropped_share: Figure
    """Of the samples, by the drop limit."""
    dropped_token_share: Figure
    kept_mean_tokens: Figure
    """Mean length of what is trained on; generated is longer, which is the bias of dropping by lag."""
    length_bias: Figure
    """kept mean / generated mean: 1 without bias."""


def version_lags(trainer_version: Quantity, versions: Sequence[Quantity]) -> tuple[Figure, ...]:
    """Versions between sampling and training, one for each rollout."""
    return tuple(
        Figure(
            f"lag_{at}",
            trainer_version.value - version.value,
            "versions",
            f"{trainer_version.name} - {version.name}",
            (trainer_version, version),
        )
        for at, version in enumerate(versions)
    )


def mean_lag(lags: Sequence[Quantity]) -> Figure:
    summed = total("lag_sum", "versions", lags)
    return Figure("mean_lag", summed.value / len(lags), "versions", f"lag_sum / {len(lags)}", (summed,))


def max_lag(lags: Sequence[Quantity]) -> Figure:
    names = ", ".join(lag.name for lag in lags)
    return Figure("max_lag", max(lag.value for lag in lags), "versions", f"max({names})", tuple(lags))


def typical_lag(generation_s: Quantity, wait_s: Quantity, interval_s: Quantity) -> Figure:
    """Whole sync intervals between the start of a response and the trainer's use of it."""
    return Figure(
        "typical_lag",
        math.floor((generation_s.value + wait_s.value) / interval_s.value),
        "versions",
        f"floor(({generation_s.name} + {wait_s.name}) / {interval_s.name})",
        (generation_s, wait_s, interval_s),
    )


def over_limit(spanned: float, limit: int) -> float:
    """Chance that a sample that spans so many intervals lags more than `limit`, over all starting points."""
    return min(max(spanned - limit, 0.0), 1.0)


def episode_lengths(work: Workload) -> Lengths:
    """Sampled tokens of whole episodes: one turn's, or a lognormal with the mean and variance of all turns' sum."""
    turn, turns = work.response_tokens, work.turns
    if turns == 1 or turn.kind == "fixed" or turn.mean == 0:
        return turn if turns == 1 else Lengths(mean=turns * turn.mean)
    sigma = math.sqrt(math.log1p(turn.variance / (turns * turn.mean**2)))
    return Lengths(kind="lognormal", mean=turns * turn.mean, sigma=sigma)


def staleness_of(work: Workload, token_s: Quantity, interval_s: Quantity, limit: int) -> Staleness:
    """Of a streaming form: tokens at the pace of the full batch, the environment's mean, and the wait in the buffer.

    What is trained between two syncs gathers evenly over an interval and is taken at its end.
    `limit` is what `at_limit = "drop"` would allow.
    """
    environment = Input("episode_environment_s", work.turns * work.environment_s.mean, "s", "[workload] turns x mean")
    other = Figure(
        "environment_and_buffer_s",
        environment.value + interval_s.value / 2,
        "s",
        f"{environment.name} + {interval_s.name} / 2",
        (environment, interval_s),
    )
    return staleness(episode_lengths(work), token_s, other, interval_s, limit)


def staleness(
    lengths: Lengths, token_s: Quantity, other_s: Quantity, interval_s: Quantity, limit: int | None
) -> Staleness:
    """Lags over a distribution of lengths.

    `other_s` is what a sample takes besides its tokens: environment and buffer. `limit` None drops nothing.
    """
    tokens = [lengths.quantile((at + 0.5) / POINTS) for at in range(POINTS)]
    spanned = [(length * token_s.value + other_s.value) / interval_s.value for length in tokens]
    dropped = [0.0 if limit is None else over_limit(span, limit) for span in spanned]
    kept = [1 - share for share in dropped]
    generated, kept_sum = sum(tokens), sum(kept)
    kept_tokens = sum(share * length for share, length in zip(kept, tokens, strict=True))
    inputs = (token_s, other_s, interval_s)
    words = f"share of lengths L with (L x {token_s.name} + {other_s.name}) / {interval_s.name} over the limit"
    kept_mean = Figure(
        "kept_mean_tokens", kept_tokens / kept_sum if kept_sum else 0.0, "tokens", "mean length of what is kept", inputs
    )
    mean = generated / POINTS
    return Staleness(
        mean_lag=Figure(
            "mean_lag",
            sum(spanned) / POINTS,
            "versions",
            f"mean over lengths L of (L x {token_s.name} + {other_s.name}) / {interval_s.name}",
            inputs,
            "a response starts at any point of a sync interval with equal chance",
        ),
        lag_shares=lag_shares(spanned),
        by_length=_by_length(tokens, spanned, dropped),
        dropped_share=Figure("dropped_share", sum(dropped) / POINTS, "share", words, inputs),
        dropped_token_share=Figure(
            "dropped_token_share",
            1 - kept_tokens / generated if generated else 0.0,
            "share",
            f"{words}, weighted by L",
            inputs,
        ),
        kept_mean_tokens=kept_mean,
        length_bias=Figure(
            "length_bias",
            kept_mean.value / mean if mean else 1.0,
            "",
            "kept_mean_tokens / mean length of what is generated",
            (kept_mean,),
        ),
    )


def lag_shares(spanned: Sequence[float]) -> tuple[float, ...]:
    """Share of the samples with each whole lag from 0, given the intervals that equally likely samples span."""
    shares = [0.0] * (math.floor(max(spanned)) + 2)
    for span in spanned:
        whole = math.floor(span)
        shares[whole] += (1 - (span - whole)) / len(spanned)
        shares[whole + 1] += (span - whole) / len(spanned)
    while len(shares) > 1 and shares[-1] == 0:
        shares.pop()
    return tuple(shares)


def _by_length(tokens: Sequence[float], spanned: Sequence[float], dropped: Sequence[float]) -> tuple[LengthLag, ...]:
    """At the quantiles that a table shows."""
    picks = [min(int(share * POINTS), POINTS - 1) for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)]
    return tuple(LengthLag(tokens[at], spanned[at], dropped[at]) for at in picks)
