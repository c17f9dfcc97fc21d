"""Checkpoints, failures, barriers and the cost of weight sync."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seed_plans import plan, plan_8b

from agentrl.plan.choice.barrier import (
    barrier_utilization,
    length_utilization,
    pipelined_s,
    sequential_s,
)
from agentrl.plan.choice.checkpoints import checkpoint_overhead, young_interval_s
from agentrl.plan.choice.failures import cluster_mtbf_s, failures, redone_s, restart_s, run_with_failures_s
from agentrl.plan.choice.reliability import reliability
from agentrl.plan.choice.synchronization import sync_bubble, sync_cost
from agentrl.plan.figure import Input

costs = st.floats(1e-2, 1e3)
mtbfs = st.floats(1e3, 1e8)


def s(name: str, value: float) -> Input:
    return Input(name, value, "s")


@given(costs, mtbfs, st.floats(1e-3, 1e3))
def test_youngs_interval_is_the_minimum_of_its_cost_curve(cost: float, mtbf: float, factor: float) -> None:
    best = young_interval_s(s("cost_s", cost), s("mtbf_s", mtbf))
    other = s("interval_s", best.value * factor)
    least = checkpoint_overhead(best, s("cost_s", cost), s("mtbf_s", mtbf)).value
    assert least <= checkpoint_overhead(other, s("cost_s", cost), s("mtbf_s", mtbf)).value * (1 + 1e-12)
    assert least == pytest.approx(math.sqrt(2 * cost / mtbf))


@given(costs, mtbfs, st.floats(0, 1e4), st.floats(1, 1e5))
def test_failures_only_lengthen_a_run(cost: float, mtbf: float, restart: float, interval: float) -> None:
    work = s("work_s", 1e6)
    given = (s("cost_s", cost), s("interval_s", interval), s("restart_s", restart))
    found = run_with_failures_s(work, *given, s("mtbf_s", mtbf)).value
    assert found > work.value
    assert run_with_failures_s(work, *given, s("mtbf_s", 2 * mtbf)).value <= found


def test_restarts_of_twenty_minutes_cost_more_than_redone_work() -> None:
    count = failures(s("run_s", 14.5 * 86_400), cluster_mtbf_s(s("gpu_mtbf_s", 50_000 * 3600), Input("gpus", 8192)))
    for interval in (600, 900):
        assert restart_s(count, s("one_restart_s", 1200)).value > redone_s(count, s("interval_s", interval)).value


def test_a_run_that_fails_faster_than_it_restarts_never_ends() -> None:
    found = run_with_failures_s(s("w", 1e6), s("c", 1), s("i", 600), s("r", 1200), s("m", 1000))
    assert found.value == math.inf


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(1, 100))
def test_a_pipeline_lies_between_its_slower_stage_and_taking_turns(first: float, second: float, batches: int) -> None:
    given = (s("first_s", first), s("second_s", second), Input("batches", batches))
    piped = pipelined_s(*given).value
    assert batches * max(first, second) <= piped * (1 + 1e-12)
    assert piped <= sequential_s(*given).value * (1 + 1e-12)


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=20))
def test_utilization_at_a_barrier_is_mean_over_longest(durations: list[float]) -> None:
    found = barrier_utilization([s(f"d{at}", value) for at, value in enumerate(durations)])
    mean, longest = Input("mean", sum(durations) / len(durations)), Input("longest", max(durations))
    assert found.value == pytest.approx(length_utilization(mean, longest).value)


@given(costs, st.integers(1, 64), st.floats(0.1, 1e4))
def test_syncing_less_often_leaves_a_smaller_bubble(sync: float, updates: int, update: float) -> None:
    often = sync_bubble(s("sync_s", sync), Input("k", updates), s("update_s", update))
    seldom = sync_bubble(s("sync_s", sync), Input("k", updates + 1), s("update_s", update))
    assert 0 < seldom.value < often.value < 1


def test_the_tax_of_a_plan_is_idle_gpus_at_its_price() -> None:
    found = sync_cost(plan_8b(), s("step_s", 600), s("step_sync_s", 60), Input("syncs", 2))
    assert found.share.value == pytest.approx(0.1)
    assert found.tax_gpus.value == pytest.approx(6.4)
    assert found.usd_per_year.value == pytest.approx(6.4 * plan_8b().gpu_usd_per_hour * 8760)
    # One update a step, in half of which one of two syncs falls: 30 s after every 270 s.
    assert found.bubble.value == pytest.approx(0.1)


def test_a_large_model_saves_no_oftener_than_it_can_write() -> None:
    found = reliability(plan("DeepSeek-V3", 512), s("step_s", 650), 512)
    assert found.young_s.value < found.write_s.value == found.interval_s.value
    assert found.copy_s.value < found.write_s.value
    assert found.run_s.value > found.work_s.value
    assert found.failures.value == pytest.approx(found.run_s.value / found.mtbf_s.value)


def test_a_small_model_saves_at_youngs_interval() -> None:
    found = reliability(plan_8b(), s("step_s", 620), 22)
    assert found.interval_s.value == found.young_s.value > found.write_s.value
