"""Lag by length and what a drop limit does to the lengths that are trained on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.plan.choice.staleness import (
    Cut,
    Staleness,
    episode_lengths,
    lag_shares,
    over_limit,
    staleness,
    typical_lag,
)
from agentrl.plan.figure import Input
from agentrl.plan.workload import Lengths, Workload

LENGTHS = st.one_of(
    st.floats(1, 40_000).map(lambda mean: Lengths(mean=mean)),
    st.tuples(st.floats(100, 20_000), st.floats(0.2, 2)).map(
        lambda given: Lengths(kind="lognormal", mean=given[0], sigma=given[1], cap=4 * given[0])
    ),
    st.lists(st.floats(1, 1e5), min_size=1, max_size=20).map(
        lambda values: Lengths(kind="empirical", values=tuple(values))
    ),
)
INTERVALS = st.floats(5, 5000)


def of(lengths: Lengths, interval: float, limit: int | None, other: float = 0.0) -> Staleness:
    return staleness(
        lengths, Input("token_s", 0.02, "s"), Input("other_s", other, "s"), Input("interval_s", interval, "s"), limit
    )


def cut_of(lengths: Lengths, interval: float, limit: int) -> Cut:
    found = of(lengths, interval, limit).cut
    assert found is not None
    return found


@given(LENGTHS, INTERVALS, st.integers(0, 20))
def test_a_higher_limit_drops_less_and_keeps_longer_responses(lengths: Lengths, interval: float, limit: int) -> None:
    tight, loose = cut_of(lengths, interval, limit), cut_of(lengths, interval, limit + 1)
    assert loose.dropped_share.value <= tight.dropped_share.value
    assert loose.dropped_token_share.value <= tight.dropped_token_share.value + 1e-12
    if tight.dropped_share.value < 1:
        assert loose.kept_mean_tokens.value >= tight.kept_mean_tokens.value * (1 - 1e-9)


@given(LENGTHS, INTERVALS, st.integers(0, 20))
def test_dropping_by_lag_never_keeps_longer_than_generated(lengths: Lengths, interval: float, limit: int) -> None:
    found = cut_of(lengths, interval, limit)
    assert found.length_bias.value <= 1 + 1e-9
    assert found.dropped_token_share.value >= found.dropped_share.value - 1e-9


@given(LENGTHS, INTERVALS)
def test_lag_shares_are_a_distribution_with_the_mean_lag(lengths: Lengths, interval: float) -> None:
    found = of(lengths, interval, None)
    assert sum(found.lag_shares) == pytest.approx(1)
    assert sum(lag * share for lag, share in enumerate(found.lag_shares)) == pytest.approx(found.mean_lag.value)
    assert found.cut is None, "no limit, nothing cut"


@given(st.lists(st.floats(0, 30), min_size=1, max_size=50), st.integers(0, 30))
def test_over_limit_is_the_distributions_own_tail(spanned: list[float], limit: int) -> None:
    over = float(over_limit(np.array(spanned), limit).mean())
    shares = lag_shares(spanned)
    assert sum(shares[limit + 1 :]) == pytest.approx(over, abs=1e-9)


@given(st.floats(0, 1e5), st.floats(0, 1e5), INTERVALS)
def test_the_typical_lag_is_the_one_of_a_response_that_starts_with_its_interval(
    generation: float, wait: float, interval: float
) -> None:
    found = typical_lag(Input("g", generation, "s"), Input("w", wait, "s"), Input("t", interval, "s"))
    spanned = (generation + wait) / interval
    assert found.value <= spanned < found.value + 1


def test_long_responses_go_first() -> None:
    """2K, 8K and 32K at 20 ms a token and 150 s between syncs: with a limit of 3 the longest third is lost."""
    found = of(Lengths(kind="empirical", values=(2048, 8192, 32_768)), 150, 3)
    assert found.cut is not None
    assert found.cut.dropped_share.value == pytest.approx(1 / 3, abs=3e-3)
    assert found.cut.kept_mean_tokens.value == pytest.approx(5120, rel=1e-2)
    assert (found.by_length[0].dropped, found.by_length[-1].dropped) == (0, 1)


def test_turns_add_up_to_less_spread_than_one_long_response() -> None:
    turn = Lengths(kind="lognormal", mean=400, sigma=1.0)
    whole = episode_lengths(Workload(prompts=1, samples=1, response_tokens=turn, turns=20))
    assert whole.mean == pytest.approx(8000)
    assert whole.quantile(0.99) / whole.mean < turn.quantile(0.99) / turn.mean


def test_environment_and_buffer_age_a_sample_too() -> None:
    work = Workload(prompts=500, samples=8, response_tokens=Lengths(mean=400), turns=20, environment_s=Lengths(mean=30))
    token, interval = Input("token_s", 0.025, "s"), Input("interval_s", 150, "s")
    environment = Input("environment_s", work.turns * work.environment_s.mean, "s")
    found = staleness(episode_lengths(work), token, environment, interval, 8, group=work.samples)
    assert found.mean_lag.value == pytest.approx(20 * (400 * 0.025 + 30) / 150 + 1)


def test_samples_that_begin_early_in_an_interval_meet_fewer_versions() -> None:
    """u + 1.7 reaches 2 for u from 0.3: 7 of 10 starts at any time, 2 of 5 in the first half, none in the first 0.3."""
    lags = np.array([1.7])
    for begins, over in ((1.0, 0.7), (0.5, 0.4), (0.3, 0.0)):
        assert over_limit(lags, 1, begins)[0] == pytest.approx(over)
