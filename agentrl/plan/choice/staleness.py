"""How many versions behind a sample will be, by its length. Called by `options` and the report.

A sample is trained when its whole group is there. If its group takes x intervals between two syncs, from any point of
one with equal chance, it meets x syncs on average: floor(x), or one more if it began late. On GPUs of its own the
trainer takes it after the next sync, one version later; where it shares them, before.
Invariant: lag grows with length, so that whatever a limit drops is longer than what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.workload import Lengths, Workload

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Of lengths, that a table shows."""
POINTS, MATES = 400, 40
"""Values of equal share that stand for a distribution of lengths, and for that of the longest other of a group."""


@dataclass(frozen=True)
class LengthLag:
    """What becomes of the responses of one length."""

    tokens: float
    mean_lag: float
    dropped: float
    """Share of them that the limit drops."""


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


def episode_lengths(work: Workload) -> Lengths:
    """Sampled tokens of whole episodes: one turn's, or a lognormal with the mean and variance of all turns' sum."""
    turn, turns = work.response_tokens, work.turns
    if turns == 1 or turn.kind == "fixed" or turn.mean == 0:
        return turn if turns == 1 else Lengths(mean=turns * turn.mean)
    sigma = math.sqrt(math.log1p(turn.variance / (turns * turn.mean**2)))
    return Lengths(kind="lognormal", mean=turns * turn.mean, sigma=sigma)


def staleness_of(work: Workload, token_s: Quantity, interval_s: Quantity, limit: int, taken_after: int) -> Staleness:
    """Of a streaming form: tokens at the pace of the full batch, and the environment's mean.

    `limit` is what `at_limit = "drop"` would allow.
    """
    environment = Input("episode_environment_s", work.turns * work.environment_s.mean, "s", "[workload] turns x mean")
    return staleness(episode_lengths(work), token_s, environment, interval_s, limit, taken_after, work.samples)


def staleness(
    lengths: Lengths,
    token_s: Quantity,
    other_s: Quantity,
    interval_s: Quantity,
    limit: int | None,
    taken_after: int = 1,
    group: int = 1,
) -> Staleness:
    """Lags over a distribution of lengths, for groups of `group` samples that start together.

    `other_s` is what a sample takes besides its tokens; `taken_after` the syncs between its group's end and its
    training. `limit` None drops nothing.
    """
    tokens = [lengths.quantile((at + 0.5) / POINTS) for at in range(POINTS)]
    mates = [lengths.quantile(((at + 0.5) / MATES) ** (1 / (group - 1))) for at in range(MATES)] if group > 1 else [0.0]
    lags = [
        [(max(length, mate) * token_s.value + other_s.value) / interval_s.value + taken_after for mate in mates]
        for length in tokens
    ]
    dropped = [0.0 if limit is None else _mean([over_limit(value, limit) for value in row]) for row in lags]
    after = Input("taken_after", taken_after, "versions", "the form")
    inputs = (token_s, other_s, interval_s, Input("group_size", group, source="[workload]"), after)
    lag = f"(longest of the group x {token_s.name} + {other_s.name}) / {interval_s.name} + {after.name}"
    by_length = tuple(
        LengthLag(tokens[at], _mean(lags[at]), dropped[at]) for at in (int(share * (POINTS - 1)) for share in QUANTILES)
    )
    shown = [
        Figure(f"lag_p{100 * share:g}", row.mean_lag, "versions", f"{lag} at {row.tokens:,.0f} tokens", inputs)
        for share, row in zip(QUANTILES, by_length, strict=True)
    ]
    samples, token_share, kept, bias = _cut(tokens, dropped, f"share of {lag} over the limit", inputs)
    return Staleness(
        mean_lag=Figure("mean_lag", _mean([_mean(row) for row in lags]), "versions", f"mean of {lag}", inputs),
        lag_p10=shown[0],
        lag_p50=shown[2],
        lag_p90=shown[4],
        lag_p99=shown[5],
        lag_shares=lag_shares([value for row in lags for value in row]),
        by_length=by_length,
        dropped_share=samples,
        dropped_token_share=token_share,
        kept_mean_tokens=kept,
        length_bias=bias,
    )


def _cut(
    tokens: Sequence[float], dropped: Sequence[float], words: str, inputs: tuple[Quantity, ...]
) -> tuple[Figure, Figure, Figure, Figure]:
    """Share of samples and of tokens dropped, mean length of the rest, and that over the mean of all."""
    kept_tokens = _mean([(1 - share) * length for share, length in zip(dropped, tokens, strict=True)])
    generated, kept_share = _mean(tokens), 1 - _mean(dropped)
    mean = kept_tokens / kept_share if kept_share else 0.0
    kept = Figure("kept_mean_tokens", mean, "tokens", "mean length of what is kept", inputs)
    token_share = 1 - kept_tokens / generated if generated else 0.0
    bias, formula = mean / generated if generated else 1.0, f"{kept.name} / mean length of what is generated"
    return (
        Figure("dropped_share", 1 - kept_share, "share", words, inputs),
        Figure("dropped_token_share", token_share, "share", f"{words}, by tokens", inputs),
        kept,
        Figure("length_bias", bias, "", formula, (kept,)),
    )


def over_limit(mean_lag: float, limit: int) -> float:
    """Chance that a sample of this mean lag lags more than `limit`, over all starting points in an interval."""
    return min(max(mean_lag - limit, 0.0), 1.0)


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
