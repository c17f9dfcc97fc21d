"""The split between generating and training: chosen by time, recomputed on each side, checked against memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seed_plans import plan, plan_8b

from agentrl.plan.choice import Form, Phases, Scaled, Split, fastest, split_at, split_curve
from agentrl.plan.choice.forms import Overlap, step_s
from agentrl.plan.choice.phases import PlanPhases
from agentrl.plan.choice.split import rollout_gpus_by_time
from agentrl.plan.figure import Input, explain

SEPARATE = [form for form in Form if form.separate]
seconds = st.floats(0.1, 1e4)


def times(throughput: float, tail: float, training: float, sync: float = 0.0, gpus: int = 64) -> Scaled:
    given = (("throughput_s", throughput), ("tail_s", tail), ("training_s", training), ("sync_s", sync))
    return Scaled(*(Input(name, value, "s") for name, value in given), gpus)


def best_of(form: Form, phases: Phases, gpus: int, **units: int) -> Split:
    best = fastest(split_curve(form, phases, gpus, **units))
    assert best is not None
    return best


@given(seconds, seconds, seconds, st.integers(2, 200), st.sampled_from(SEPARATE))
def test_no_split_is_faster_than_the_chosen_one(
    throughput: float, tail: float, training: float, gpus: int, form: Form
) -> None:
    phases = times(throughput, tail, training)
    best = best_of(form, phases, gpus)
    assert all(best.step_s.value <= split_at(form, phases, size, gpus - size).step_s.value for size in range(1, gpus))


@given(seconds, seconds, seconds, st.integers(500, 4000), st.sampled_from([Form.ONE_STEP, Form.ASYNC]))
@settings(max_examples=20, deadline=None)
def test_a_grid_finds_the_split_that_trying_all_finds(
    throughput: float, tail: float, training: float, gpus: int, form: Form
) -> None:
    phases = times(throughput, tail, training)
    tried = fastest(split_curve(form, phases, gpus, points=gpus))
    assert tried is not None
    assert best_of(form, phases, gpus).step_s.value == pytest.approx(tried.step_s.value)
    assert len(split_curve(form, phases, gpus)) < 450


@given(
    st.integers(1, 1024), st.integers(200, 30_000), st.sampled_from([8, 24, 64]), st.sampled_from([1, 2, 4]),
    st.sampled_from(SEPARATE),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_the_ledgers_split_is_as_fast_as_its_neighbours(
    prompts: int, tokens: int, gpus: int, instance: int, form: Form
) -> None:
    of = plan(
        "Qwen2.5-7B", gpus, prompts=prompts, rollout={"gpus_per_instance": instance},
        response_tokens={"kind": "lognormal", "mean": tokens, "cap": 4 * tokens},
    )  # fmt: skip
    phases = PlanPhases(of, form)
    best = best_of(form, phases, gpus, rollout_unit=instance)
    for size in (best.rollout_gpus - instance, best.rollout_gpus + instance):
        if instance <= size < gpus:
            neighbour = split_at(form, phases, size, gpus - size)
            assert best.step_s.value <= neighbour.step_s.value or not neighbour.feasible


@given(seconds, seconds, seconds, seconds, st.integers(1, 63))
def test_async_is_never_slower_than_one_step_with_as_many_syncs(
    throughput: float, tail: float, training: float, sync: float, rollout: int
) -> None:
    phases = times(throughput, tail, training, sync)
    slow, fast = (split_at(form, phases, rollout, 64 - rollout) for form in (Form.ONE_STEP, Form.ASYNC))
    assert fast.step_s.value <= slow.step_s.value


@given(seconds, seconds, seconds, st.integers(1, 63))
def test_taking_turns_on_separate_pools_is_slower_than_sharing_one(
    throughput: float, tail: float, training: float, rollout: int
) -> None:
    phases = times(throughput, tail, training)
    nothing = Input("nothing_s", 0.0, "s")
    shared = step_s(Form.COLOCATED, phases.throughput, phases.tail, phases.training, nothing, nothing)
    assert split_at(Form.SEPARATE_SYNC, phases, rollout, 64 - rollout).step_s.value >= shared.value


def test_each_side_is_computed_on_its_own_gpus() -> None:
    phases = PlanPhases(plan_8b(), Form.ONE_STEP)
    few, all_of_them = phases.rollout(16), phases.rollout(64)
    assert few.decoding.value == all_of_them.decoding.value == 92
    assert phases.throughput_s(16).value == pytest.approx(4 * phases.throughput_s(64).value)
    # 128 GPUs hold all sequences at once: a decode step reads less, but by less than half.
    more = phases.rollout(128)
    assert more.decoding.value == 64
    assert phases.throughput_s(128).value > 0.5 * phases.throughput_s(64).value
    assert phases.tail_s(128).value == phases.tail_s(16).value


def test_a_tail_that_does_not_shrink_moves_the_split_away_from_the_ratio() -> None:
    phases = times(300, 700, 300)
    ratio = rollout_gpus_by_time(Input("generation_s", 1000, "s"), Input("training_s", 300, "s"), Input("gpus", 64))
    best = best_of(Form.ONE_STEP, phases, 64)
    assert round(ratio.value) == 49
    assert best.rollout_gpus < 49
    assert best.step_s.value < split_at(Form.ONE_STEP, phases, 49, 15).step_s.value


def test_a_trainer_that_does_not_fit_moves_the_split() -> None:
    tree: dict[str, Any] = {"rollout": {"gpus_per_instance": 32, "weight_bytes": 1}, "trainer": {"model_parallel": 8}}
    of = plan("DeepSeek-V3", 512, **tree)
    curve = split_curve(Form.ONE_STEP, PlanPhases(of, Form.ONE_STEP), 512, rollout_unit=32, trainer_unit=32)
    best, unbound = fastest(curve), min(curve, key=lambda split: split.step_s.value)
    assert best is not None
    assert best.feasible
    narrow = next(split for split in curve if split.trainer_gpus == 128)
    assert not narrow.feasible
    assert "at least" in narrow.problems[0]
    assert unbound.step_s.value <= best.step_s.value


def test_the_next_pool_that_fits_is_found_in_units_of_its_ranks() -> None:
    """Three times the time for generation asks for 384 : 128; in units of 128 the trainer needs 256."""
    tree: dict[str, Any] = {"rollout": {"gpus_per_instance": 32, "weight_bytes": 1}, "trainer": {"model_parallel": 8}}
    memory = PlanPhases(plan("DeepSeek-V3", 512, **tree), Form.ASYNC)

    class Checked(Scaled):
        def problems(self, rollout_gpus: int, trainer_gpus: int) -> tuple[str, ...]:
            return memory.problems(rollout_gpus, trainer_gpus)

    known = times(3, 9, 1, gpus=512)
    checked = Checked(known.throughput, known.tail, known.training, known.sync, 512)
    assert best_of(Form.ASYNC, known, 512, rollout_unit=32, trainer_unit=128).label == "384:128"
    assert best_of(Form.ASYNC, checked, 512, rollout_unit=32, trainer_unit=128).label == "256:256"


def test_the_curve_respects_both_units() -> None:
    curve = split_curve(Form.ASYNC, times(1, 1, 1), 64, rollout_unit=4, trainer_unit=8)
    assert curve
    assert all(split.rollout_gpus % 4 == 0 and split.trainer_gpus % 8 == 0 for split in curve)
    assert all(split.rollout_gpus + split.trainer_gpus == 64 for split in curve)


@pytest.mark.parametrize(
    ("form", "separate", "overlap"),
    [
        (Form.COLOCATED, False, Overlap.NONE),
        (Form.SEPARATE_SYNC, True, Overlap.NONE),
        (Form.COLOCATED_ASYNC, False, Overlap.STREAM),
        (Form.ONE_STEP, True, Overlap.BATCH),
        (Form.ASYNC, True, Overlap.STREAM),
    ],
)
def test_placement_and_waiting_are_two_questions(form: Form, separate: bool, overlap: Overlap) -> None:
    assert (form.separate, form.overlap) == (separate, overlap)


def test_a_step_explains_both_sides() -> None:
    text = explain(best_of(Form.ONE_STEP, PlanPhases(plan_8b(), Form.ONE_STEP), 64).step_s)
    assert all(word in text for word in ("step_s.one_step", "throughput_s", "trainer_gpus = 18", "rollout_gpus = 46"))
