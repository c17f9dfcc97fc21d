"""Communication of ranks: against sums by hand, at its borders, and in the times that count it."""

from __future__ import annotations

from typing import Any

import pytest
from seed_plans import plan, plan_8b, plan_v3

from agentrl.plan.choice.choose import choose
from agentrl.plan.inputs import Assumptions, PlanInput
from agentrl.plan.ledger import Ledger, Training


def of_32b(**trainer: Any) -> PlanInput:
    return plan("Qwen2.5-32B", 128, prompt_tokens=1024, rollout={"gpus_per_instance": 2}, trainer=trainer)


def counted(of: PlanInput, overlap: float = 0.0) -> PlanInput:
    assume = Assumptions(count_communication=True, communication_overlap=overlap)
    return of.model_copy(update={"assume": assume})


def value(ledger: Ledger, name: str) -> float:
    return ledger.find(name).value


def test_the_32b_by_hand() -> None:
    """32 replicas of 4 GPUs; 512 x 16 x (1,024 + 8,192) tokens; 2 forward passes, then forward, recompute, backward."""
    ledger = Ledger(of_32b(model_parallel=4))
    tokens = 512 * 16 * 9216 / 32
    reduced = 2 * 64 * 5 * tokens * 5120 * 2 * 2 * 3 / 4
    assert value(ledger, "train_all_reduce_bytes") == pytest.approx(reduced)
    assert value(ledger, "train_all_reduce_s") == pytest.approx(reduced / 450e9)
    micro = 144
    assert value(ledger, "micro_batches") == micro
    parameters = ledger.plan.shape.parameters
    assert value(ledger, "train_gather_bytes") == pytest.approx(parameters * 2 * 4 * micro / 4 * 31 / 32)
    assert value(ledger, "train_scatter_bytes") == pytest.approx(parameters * 2 * micro / 4 * 31 / 32)
    assert value(ledger, "train_gather_s") == pytest.approx(value(ledger, "train_gather_bytes") / 50e9)
    batch = ledger.rollout.decoding.value
    step = 2 * 64 * batch * 5120 * 2 / 450e9 + 2 * 64 * 10e-6
    assert value(ledger, "decode_step_communication_s") == pytest.approx(step)


def test_experts_stay_and_tokens_travel() -> None:
    ledger = Ledger(plan_v3())
    shape = ledger.plan.shape
    assert shape.sparse_layers == 58
    assert shape.parameters_outside_experts < 0.05 * shape.parameters
    assert value(ledger, "gathered_parameters") == shape.parameters_outside_experts
    tokens = ledger.rollout.tokens.all.value / 256
    expected = 2 * 58 * 5 * tokens * 8 * 7168 * 2 * 255 / 256
    assert value(ledger, "train_all_to_all_bytes") == pytest.approx(expected)


def test_one_gpu_sends_nothing() -> None:
    alone = plan("Qwen2.5-0.5B", 1, prompts=8, samples=4, response_tokens=200)
    for figure in Ledger(alone).communication:
        assert figure.value == 0, figure.name


def test_times_hold_it_only_when_the_plan_counts_it() -> None:
    of = of_32b(model_parallel=4)
    without, with_it, hidden = Ledger(of), Ledger(counted(of)), Ledger(counted(of, 1.0))
    added = value(with_it, "train_communication_s") + value(with_it, "rollout_communication_s")
    assert added > 100
    assert with_it.step.value == pytest.approx(without.step.value + added)
    assert hidden.step.value == pytest.approx(without.step.value)
    for ledger in (without, with_it, hidden):
        assert sum(part.value for part in ledger.waterfall) == pytest.approx(1)
    assert choose(counted(of)).chosen.step_s.value > choose(of).chosen.step_s.value


def test_a_pipeline_has_a_bubble_of_its_stages_over_its_micro_batches() -> None:
    of = of_32b(model_parallel=4, pipeline_parallel=4, updates=4)
    training = Training(counted(of), 128)
    # 8 replicas of 16 GPUs: four times the micro-batches of 32 replicas, in four updates.
    assert training.communication.micro_batches.value == 4 * 144
    compute = training.forward.value + training.update.value
    assert training.bubble.value == pytest.approx(compute * 3 / 144)
    assert Training(of_32b(model_parallel=4), 128).bubble.value == 0


def test_a_small_group_uses_the_links_of_its_node() -> None:
    base = plan_8b()
    for ranks, rate in ((8, 450e9), (16, 50e9)):
        ledger = Ledger(base.model_copy(update={"trainer": base.trainer.model_copy(update={"model_parallel": ranks})}))
        sent = value(ledger, "train_all_reduce_bytes")
        assert value(ledger, "train_all_reduce_s") == pytest.approx(sent / rate)


def test_a_plan_says_what_its_times_leave_out() -> None:
    small = choose(plan_8b())
    large = choose(plan("DeepSeek-V3", 512, rollout={"gpus_per_instance": 32, "weight_bytes": 1}))
    left_out, training = small.uncounted, Training(plan_8b(), 64)
    assert left_out is not None
    assert left_out.training_s.value == pytest.approx(107.5, abs=0.1)
    assert left_out.training_room_s.value == pytest.approx(0.5 * training.forward.value + 0.6 * training.update.value)
    (note,) = [reason for reason in small.reasons if "not in these times" in reason]
    assert "107.5 s" in note
    assert "have room for 117.4 s" in note
    notes = [reason for reason in large.reasons if "not in these times" in reason]
    assert any("the trainer's ranks" in note and "longer than it says here" in note for note in notes)


def test_a_plan_that_counts_it_or_has_one_rank_leaves_nothing_out() -> None:
    for of in (counted(plan_8b()), plan("Qwen2.5-0.5B", 1, prompts=8, samples=4, response_tokens=200)):
        choice = choose(of)
        assert choice.uncounted is None
        assert not any("not in these times" in reason for reason in choice.reasons)
