"""The simulator against closed forms, within 3 percent, where those hold; and what it promises beside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from agentrl.core.errors import ConfigError
from agentrl.plan.simulate import Form, Parameters, Policy, Result, simulate
from agentrl.plan.simulate.sandboxes import Pools
from agentrl.plan.workload import Lengths

CLOSE = 0.03


def fixed(value: float) -> Lengths:
    return Lengths(mean=value)


def lognormal(mean: float, sigma: float, cap: float | None = None) -> Lengths:
    return Lengths(kind="lognormal", mean=mean, sigma=sigma, cap=cap)


def exponential(mean: float) -> Lengths:
    """By its quantiles."""
    count = 20_000
    return Lengths(kind="empirical", values=tuple(-mean * math.log(1 - (i + 0.5) / count) for i in range(count)))


BASE = Parameters(
    form=Form.COLOCATED, policy=Policy.WAIT, replicas=16, concurrency=32, batch=512, steps=4, tokens=fixed(1000),
    decode_base_s=0.008, decode_sequence_s=0.0003, train_s=20.0, sync_s=1.0,
)  # fmt: skip
CONTINUING = (Policy.PARTIAL, Policy.BACKFILL)
KINDS = [
    (form, policy) for form in Form for policy in Policy if form is not Form.COLOCATED_ASYNC or policy in CONTINUING
]
HARMONIC_512 = sum(1 / k for k in range(1, 513))


def close(value: float) -> object:
    return pytest.approx(value, rel=CLOSE)


def test_fixed_lengths_in_one_wave_take_as_many_steps_as_tokens() -> None:
    found = simulate(BASE)
    assert found.generation_s == close(1000 * (0.008 + 32 * 0.0003))
    assert found.step_s == close(1000 * (0.008 + 32 * 0.0003) + 20 + 1)
    assert found.tail_share == pytest.approx(0, abs=1e-9)


def test_fixed_lengths_in_whole_waves_take_that_many_times_one() -> None:
    found = simulate(replace(BASE, concurrency=8))
    assert found.generation_s == close(4 * 1000 * BASE.decode_step_s(8))


def test_fixed_lengths_with_a_last_wave_that_is_half_full() -> None:
    found = simulate(replace(BASE, concurrency=8, batch=16 * 12))
    assert found.generation_s == close(1000 * (BASE.decode_step_s(8) + BASE.decode_step_s(4)))


def test_a_limit_of_what_decodes_at_once_queues_turns_as_places_do() -> None:
    assert simulate(replace(BASE, decode_limit=8)).generation_s == close(4 * 1000 * BASE.decode_step_s(8))
    # 32 held, 8 decode, and each rests as long as three others decode: the engine never does.
    rest = 3 * 100 * BASE.decode_step_s(8)
    turns = replace(BASE, decode_limit=8, turns=10, tokens=fixed(100), environment=fixed(rest))
    assert simulate(turns).generation_s == close(10 * 4 * 100 * BASE.decode_step_s(8) + rest)


def test_many_waves_come_near_the_throughput_of_full_replicas() -> None:
    busy = replace(BASE, replicas=4, concurrency=16, batch=4 * 16 * 64, tokens=lognormal(300, 0.3), steps=2)
    found = simulate(busy)
    tokens = found.steps[0].tokens
    assert found.steps[0].generated == close(tokens * busy.decode_step_s(16) / (16 * 4))


def test_an_exponential_tail_ends_with_the_expected_maximum() -> None:
    # With a step that costs the same for any number of sequences, generation lasts as long as its longest trajectory.
    flat = replace(BASE, decode_sequence_s=0.0, tokens=exponential(1000), steps=60, train_s=0, sync_s=0)
    assert simulate(flat).generation_s == close(0.008 * 1000 * HARMONIC_512)


def test_one_wave_uses_its_places_by_the_mean_over_the_longest() -> None:
    capped = replace(BASE, decode_sequence_s=0.0, tokens=lognormal(4000, 1.0, 16384), train_s=0, sync_s=0, steps=20)
    assert simulate(capped).place_use == close(4000 / 16384)


def test_one_step_pipeline_takes_the_longer_of_generating_and_training() -> None:
    generation = 1000 * BASE.decode_step_s(32)
    for train in (generation / 2, 2 * generation):
        found = simulate(replace(BASE, form=Form.ONE_STEP, train_s=train, steps=12))
        assert found.step_s == close(max(generation, train) + 1)
        assert found.lag_mean == 1


def async_of(train_s: float, **changes: object) -> Result:
    heavy = replace(BASE, form=Form.ASYNC, policy=Policy.BACKFILL, tokens=lognormal(1000, 1.0, 8000), steps=40)
    return simulate(replace(heavy, train_s=train_s, **changes))


def test_async_takes_the_longer_of_throughput_and_training_whatever_the_tail() -> None:
    generation = 512 * 1000 * BASE.decode_step_s(32) / (16 * 32)
    slow_generation = async_of(generation / 2, sync_s=0.0)
    assert slow_generation.step_s == close(generation)
    assert slow_generation.place_use == close(1.0)
    slow_training = async_of(3 * generation)
    assert slow_training.step_s == close(3 * generation + 1)
    assert slow_training.trainer_idle == pytest.approx(1 / (3 * generation + 1), abs=0.01)


def test_a_sync_stops_generation_for_its_share_of_the_interval() -> None:
    # Training sets the pace and the bound on the lag does not: places decode except while weights are loaded.
    found = async_of(60.0, sync_s=15.0)
    assert 1 - found.place_use == close(15 / 75)


def test_staleness_of_fixed_lengths_is_the_time_over_the_interval() -> None:
    # A trajectory of 80, 320 or 640 s begins at any moment of an interval of 200 s.
    for seconds in (80.0, 320.0, 640.0):
        slow = replace(
            BASE, form=Form.ASYNC, policy=Policy.BACKFILL, decode_sequence_s=0.0, decode_base_s=0.01, steps=60
        )
        tokens, batch = lognormal(seconds / 0.01, 0.05), int(16 * 8 * 200 / seconds)
        one = replace(slow, tokens=tokens, concurrency=8, batch=batch, train_s=20.0, sync_s=0.0)
        found = simulate(one)
        assert found.step_s == close(200)
        # The version to be trained loads 20 s into the interval: what began before that is a version older.
        assert found.lag_mean == close((seconds + 20) / 200)


def test_a_lag_limit_drops_what_takes_longer_and_only_that() -> None:
    lengths = Lengths(kind="empirical", values=(4000.0, 4000.0, 4000.0, 64_000.0))
    slow = replace(BASE, form=Form.ASYNC, policy=Policy.DROP, decode_sequence_s=0.0, decode_base_s=0.01, sync_s=0.0)
    found = simulate(replace(slow, tokens=lengths, batch=128, concurrency=20, train_s=100.0, max_lag=2, steps=60))
    trained = found.tally.trained.sum(axis=1)
    # 640 s at a step every 100 s or so are five versions and more: every long one goes, hardly a short one does.
    assert trained[15] == 0
    assert found.tally.dropped[15] > 0.95 * found.tally.dropped.sum()


def test_sandboxes_in_use_follow_littles_law() -> None:
    agentic = replace(
        BASE, turns=20, tokens=fixed(100), environment=lognormal(30, 0.5), decode_base_s=0.1, decode_sequence_s=0.0,
        concurrency=250, batch=4000, steps=1, train_s=0.0, sync_s=0.0,
    )  # fmt: skip
    held = simulate(agentic)
    one = 20 * (10 + 30)
    assert held.sandboxes.mean == close(4000 * one / held.steps[-1].ended)
    assert held.sandboxes.peak == 4000
    released = simulate(replace(agentic, sandbox_held=False))
    assert released.sandboxes.mean == close(4000 * 20 * 30 / released.steps[-1].ended)


def test_a_limited_pool_of_sandboxes_sets_the_pace() -> None:
    limited = replace(
        BASE, turns=10, tokens=fixed(10), environment=fixed(30.0), sandboxes=64, concurrency=32, steps=1, train_s=0.0,
        sandbox_held=False, sync_s=0.0,
    )  # fmt: skip
    # 512 trajectories, 10 executions of 30 s each, by 64 sandboxes.
    assert simulate(limited).generation_s == close(512 * 10 * 30 / 64)
    held = replace(limited, sandbox_held=True)
    assert simulate(held).generation_s == close(512 / 64 * (10 * 30 + 100 * BASE.decode_step_s(4)))


def erlang_c_wait(servers: int, load: float, service_s: float) -> float:
    """Mean wait in an M/M/c queue."""
    inverse = 1.0
    for k in range(1, servers + 1):
        inverse = 1 + inverse * k / load
    busy = 1 / inverse
    share = busy / (1 - load / servers * (1 - busy))
    return share * service_s / (servers - load)


def test_a_pool_waits_as_an_mmc_queue_does() -> None:
    rng, servers, load = np.random.default_rng(5), 8, 6.4
    rows = np.arange(500)
    pools, at = Pools(len(rows), servers), np.zeros(len(rows))
    for arrival in range(3000):
        at = at + rng.exponential(1 / load, len(rows))
        if arrival == 500:
            pools.waited_s, pools.served = 0.0, 0
        pools.begin(rows, at, rng.exponential(1.0, len(rows)))
    assert pools.waited_s / pools.served == close(erlang_c_wait(servers, load, 1.0))


@pytest.mark.parametrize(("form", "policy"), KINDS)
def test_the_same_seed_gives_the_same_numbers_and_another_one_others(form: Form, policy: Policy) -> None:
    few = replace(BASE, form=form, policy=policy, tokens=lognormal(1000, 1.0, 8000), steps=3, batch=128, group_size=8)
    first = simulate(few)
    assert first.steps == simulate(few).steps
    assert first.steps != simulate(replace(few, seed=1)).steps


@pytest.mark.parametrize(("form", "policy"), KINDS)
def test_every_batch_is_whole_and_in_order(form: Form, policy: Policy) -> None:
    found = simulate(
        replace(
            BASE,
            form=form,
            policy=policy,
            tokens=lognormal(1000, 1.0, 8000),
            steps=6,
            batch=256,
            group_size=8,
            max_lag=2,
        )
    )
    for before, after in zip(found.steps, found.steps[1:], strict=False):
        assert after.began == before.ended
        assert before.train_began >= before.generated or form is Form.ONE_STEP
        assert before.ended >= before.trained >= before.train_began
        assert before.trajectories >= 256
    if policy is not Policy.DROP:
        assert int(found.tally.trained.sum()) == 6 * 256
        assert found.dropped_share == 0
    if form is Form.ASYNC and policy in (Policy.WAIT, Policy.DROP):
        assert found.tally.trained[:, 3:].sum() == 0
    if form in (Form.COLOCATED, Form.SEPARATE_SYNC) and policy in (Policy.WAIT, Policy.DROP):
        assert found.lag_mean == 0


def test_dropping_the_unfinished_takes_the_short_ones() -> None:
    heavy = replace(BASE, tokens=lognormal(1000, 1.2, 16000), steps=6)
    waited, dropped = simulate(heavy), simulate(replace(heavy, policy=Policy.DROP))
    mean = [found.steps[0].tokens / found.steps[0].trajectories for found in (waited, dropped)]
    assert mean[1] < 0.9 * mean[0]
    assert dropped.generation_s < 0.6 * waited.generation_s
    assert dropped.dropped_share == pytest.approx(0.2, abs=0.01)


def test_continuing_gives_back_what_the_tail_took_and_trains_on_everything() -> None:
    heavy = replace(BASE, tokens=lognormal(1000, 1.2, 16000), steps=24, continue_s_per_token=1e-5)
    waited, partial, backfill = (
        simulate(replace(heavy, policy=policy)) for policy in (Policy.WAIT, Policy.PARTIAL, Policy.BACKFILL)
    )
    assert backfill.generation_s < partial.generation_s < waited.generation_s
    assert backfill.continued_tokens > partial.continued_tokens > 0
    assert partial.dropped_share == 0
    lengths = [sum(step.tokens for step in found.steps[4:]) / 512 / 20 for found in (waited, partial)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)
    # Cut at each version, the tokens are younger than the trajectories that they belong to.
    assert partial.token_lag_mean < 16000 / 1000 * partial.lag_mean
    assert backfill.token_lag_mean > 0


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match=r"replicas must be at least 1.*train_s must be a number of seconds"):
        replace(BASE, replicas=0, train_s=-1.0)
    with pytest.raises(ConfigError, match="policy must be partial or backfill, is wait"):
        replace(BASE, form=Form.COLOCATED_ASYNC)
    with pytest.raises(ConfigError, match="batch 512 must be a multiple of group_size 7"):
        replace(BASE, group_size=7)
    with pytest.raises(ConfigError, match=r"sandboxes must be 0 or at least one a replica \(16\), is 3"):
        replace(BASE, sandboxes=3)
