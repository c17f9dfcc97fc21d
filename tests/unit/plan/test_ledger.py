"""What holds for every ledger, whatever the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seed_plans import plan, plan_8b, plan_agentic

from agentrl.core.errors import ConfigError
from agentrl.plan.figure import Figure
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Ledger, Rollout, Sync, TrainerMemory, Training, build_ledger

MODELS = {"Llama-3-8B": 1, "Qwen2.5-32B": 2, "Qwen3-30B-A3B": 2, "Llama-3-70B": 4, "DeepSeek-V3": 32}

plans = st.builds(
    lambda model, nodes, prompts, samples, mean, cap, turns, environment, tools, critic: plan(
        model,
        nodes * 32,
        prompts=prompts,
        samples=samples,
        response_tokens={"kind": "lognormal", "mean": mean, "cap": mean * cap},
        turns=turns,
        environment_s={"kind": "lognormal", "mean": environment, "cap": environment * 20} if environment else 0,
        tool_tokens=tools,
        rollout={"gpus_per_instance": MODELS[model]},
        trainer={"critic": critic},
    ),
    st.sampled_from(list(MODELS)),
    st.integers(1, 8),
    st.integers(1, 2048),
    st.integers(1, 32),
    st.integers(16, 4096),
    st.floats(1.5, 20),
    st.integers(1, 20),
    st.sampled_from([0, 1, 30]),
    st.integers(0, 2000),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(1, 4))
def test_more_gpus_are_never_slower(given_plan: PlanInput, times: int) -> None:
    few, many = given_plan.cluster.gpus, given_plan.cluster.gpus * (1 + times)
    slow, fast = Rollout(given_plan, few), Rollout(given_plan, many)
    assert fast.throughput.value <= slow.throughput.value * (1 + 1e-9)
    assert fast.tail.value == slow.tail.value
    assert Training(given_plan, many).total.value * (1 + times) == pytest.approx(Training(given_plan, few).total.value)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_the_waterfall_sums_to_the_whole(given_plan: PlanInput) -> None:
    parts = Ledger(given_plan).waterfall
    assert sum(part.value for part in parts) == pytest.approx(1)
    assert all(part.value >= -1e-9 for part in parts)
    assert parts[0].value == pytest.approx(Ledger(given_plan).mfu.value)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_memory_parts_sum_to_the_gpu(given_plan: PlanInput) -> None:
    for stack in Ledger(given_plan).stacks:
        whole = sum(part.value for part in stack.parts) + stack.free.value
        assert whole == pytest.approx(given_plan.gpu.memory_bytes)
    rollout = Ledger(given_plan).stacks[0]
    assert rollout.fits


@settings(max_examples=60, deadline=None)
@given(plans)
def test_sequences_fit_the_pool_and_prefill_its_extremes(given_plan: PlanInput) -> None:
    rollout = Rollout(given_plan, given_plan.cluster.gpus)
    held = rollout.capacity.value * rollout.context.value * rollout.kv_per_token.value
    assert held <= rollout.pool.value * (1 + 1e-9)
    assert 0 < rollout.decoding.value <= rollout.capacity.value
    prefill = rollout.prefill
    assert prefill.warm.value <= prefill.seconds.value * (1 + 1e-9)
    assert prefill.seconds.value <= prefill.cold.value * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(plans)
def test_every_name_is_one_figure(given_plan: PlanInput) -> None:
    seen: dict[str, float] = {}
    for figure in Ledger(given_plan).figures():
        for part in figure.walk():
            for leaf in (part, *(part.inputs if isinstance(part, Figure) else ())):
                assert seen.setdefault(leaf.name, leaf.value) == leaf.value, leaf.name


def test_attention_is_counted_when_asked_for() -> None:
    base = plan_8b()
    counted = base.model_copy(update={"assume": base.assume.model_copy(update={"count_attention": True})})
    without, with_it = Ledger(base), Ledger(counted)
    share = without.flops.attention_share.value
    assert with_it.flops.train.value == pytest.approx(without.flops.train.value * (1 + share))
    assert with_it.flops.forward.value == pytest.approx(without.flops.forward.value * (1 + share))
    assert with_it.step.value > without.step.value


def test_offloaded_kv_makes_prefill_linear() -> None:
    base = plan_agentic()
    kept = base.model_copy(update={"rollout": base.rollout.model_copy(update={"kv_offload": True})})
    warm = Rollout(kept, 32).prefill
    assert warm.seconds.value == warm.warm.value
    assert Rollout(base, 32).prefill.seconds.value > 5 * warm.seconds.value


def test_the_batch_and_the_turn_agree() -> None:
    """Without a measured turn, the share of time in which an episode decodes follows from the batch it makes."""
    free = plan("Llama-3-8B", 32, prompts=64, samples=4, response_tokens=400, turns=20, environment_s=30)
    rollout = Rollout(free, 32)
    each, batch = free.workload.episodes / 32, rollout.decoding.value
    prefill = rollout.prefill.seconds.value / (each * 20)
    turn = 400 * rollout.decode_step.value + batch * prefill
    assert batch == pytest.approx(each * turn / (turn + 30))
    # All of them are in flight until the last token: Little's law gives the time that the engines take.
    assert rollout.mean_episode.value == pytest.approx(rollout.throughput.value)
    assert rollout.mean_episode.value == pytest.approx(20 * (turn + 30))


def test_a_gather_within_one_node_goes_over_its_own_links() -> None:
    base = plan_8b()
    node = base.model_copy(update={"cluster": base.cluster.model_copy(update={"gpus": 8})})
    assert Sync(node, 8).ipc.value == pytest.approx(Sync(base, 64).ipc.value * 50e9 / 450e9)


def test_a_delta_sync_sends_the_changed_share_and_its_positions() -> None:
    base = plan_8b()
    delta = base.model_copy(update={"form": base.form.model_copy(update={"changed_share": 0.02})})
    assert Sync(delta, 64).bytes.value == pytest.approx(0.02 * 3 * Sync(base, 64).bytes.value)
    assert Sync(delta, 64).chosen(colocated=False).value < Sync(base, 64).chosen(colocated=False).value


def test_a_model_that_does_not_fit_names_the_setting_and_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.gpus_per_instance: 1 H100 cannot hold Llama-3-70B .* at least 2"):
        build_ledger(plan("Llama-3-70B", 64))
    small = plan("Llama-3-70B", 8, rollout={"gpus_per_instance": 4})
    with pytest.raises(ConfigError, match=r"cluster\.gpus: 8 H100 cannot hold the trainer of Llama-3-70B") as caught:
        build_ledger(small)
    least = int(caught.value.message.rsplit(" ", 1)[1])
    TrainerMemory(small, least).check()
    with pytest.raises(ConfigError):
        TrainerMemory(small, least - 1).check()
    wide = plan("Llama-3-8B", 64, trainer={"micro_batch_tokens": 400_000})
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens: .* at most \d+"):
        build_ledger(wide)


def test_sandboxes_that_keep_their_state_are_more() -> None:
    sandboxes = Ledger(plan_agentic()).sandboxes
    assert sandboxes.stateful.value > sandboxes.releasable.value
    assert [figure.name for figure in Ledger(plan_agentic()).cost] == ["gpu_usd", "cpu_usd", "step_usd"]
