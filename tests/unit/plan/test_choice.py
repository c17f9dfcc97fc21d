"""Which form is chosen, what is refused and why, and what bad plans are told."""

from __future__ import annotations

from typing import Any

import pytest
from seed_plans import REASONING, plan_8b, plan_agentic

from agentrl.core.config import parse_section
from agentrl.core.errors import ConfigError
from agentrl.plan.choice import Choice, Form, Option, choose
from agentrl.plan.choice.choose import EVEN, WORTH
from agentrl.plan.choice.nearest import least_gpus, least_instance, with_cluster
from agentrl.plan.figure import find
from agentrl.plan.inputs import PlanInput, RolloutSection


def plan(model: str = "Llama-3-8B", gpus: int = 64, gpu: str = "H100", **sections: Any) -> PlanInput:
    workload = {"prompts": 512, "samples": 16, "prompt_tokens": 500, "response_tokens": REASONING}
    tree = {
        "model": {"name": model},
        "workload": workload | sections.pop("workload", {}),
        "cluster": {"gpu": gpu, "gpus": gpus},
        **sections,
    }
    return parse_section(PlanInput, tree, "plan")


def option(choice: Choice, form: Form) -> Option:
    found = choice.option(form)
    assert found is not None
    return found


def no_tail() -> dict[str, Any]:
    return {"response_tokens": 8192}


def test_every_form_is_ranked_or_refused() -> None:
    for of in (plan_8b(), plan(form={"max_lag": 0}), plan_agentic(), plan("DeepSeek-V3", 512, rollout=FP8)):
        choice = choose(of)
        forms = [found.form for found in (*choice.options, *choice.refused)]
        assert sorted(forms) == sorted(Form)
        assert choice.chosen in choice.options
        steps = [found.step_s.value for found in choice.options]
        assert steps == sorted(steps)


FP8 = {"gpus_per_instance": 16, "weight_bytes": 1}


def test_without_a_tail_the_simplest_form_is_chosen() -> None:
    choice = choose(plan(workload=no_tail()))
    assert choice.chosen.form is Form.COLOCATED
    assert choice.chosen.staleness is None
    assert choice.streaming is not None, "what a streaming form would bring"
    assert choice.streaming.form is Form.ASYNC
    assert "the tail is 0 %" in choice.reasons[0]


def test_with_a_long_tail_the_step_does_not_wait_for_it() -> None:
    long = {"response_tokens": {"kind": "lognormal", "mean": 8192, "sigma": 1.5, "cap": 131_072}}
    choice = choose(plan(workload=long, form={"max_lag": 8}))
    assert not choice.chosen.form.waits_for_tail
    assert option(choice, Form.COLOCATED).step_s.value > WORTH * choice.chosen.step_s.value
    assert choice.staleness is not None


def test_of_two_that_stream_the_faster_is_chosen_unless_they_are_even() -> None:
    form = {"max_lag": 8}
    even, apart = choose(plan(form=form)), choose(plan("DeepSeek-V3", 512, rollout=FP8, form=form))
    for choice, faster in ((even, False), (apart, True)):
        ratio = option(choice, Form.COLOCATED_ASYNC).step_s.value / option(choice, Form.ASYNC).step_s.value
        assert (ratio > EVEN) is faster
        assert choice.chosen.form is (Form.ASYNC if faster else Form.COLOCATED_ASYNC)


def test_a_tight_limit_gives_the_tail_back_and_says_so() -> None:
    long = {"response_tokens": {"kind": "lognormal", "mean": 8192, "sigma": 1.5, "cap": 131_072}}
    tight, loose = (choose(plan(workload=long, form={"kind": "async", "max_lag": lag})) for lag in (2, 16))
    assert tight.chosen.step_s.value > loose.chosen.step_s.value
    assert any("form.max_lag = 2; from 9 it would not" in reason for reason in tight.reasons)
    assert not any("max_lag" in reason for reason in loose.reasons)


def test_no_lag_allowed_leaves_the_forms_with_none() -> None:
    choice = choose(plan(form={"max_lag": 0}))
    assert {found.form for found in choice.options} == {Form.COLOCATED, Form.SEPARATE_SYNC}
    assert all("form.max_lag: 0" in refused.why and "at least 1" in refused.why for refused in choice.refused)
    assert choice.staleness is None


@pytest.mark.parametrize("form", list(Form))
def test_the_plans_own_form_is_taken(form: Form) -> None:
    choice = choose(plan(form={"kind": form.value}))
    assert choice.chosen.form is form
    assert any(form in reason for reason in choice.reasons)


def test_the_plans_own_split_is_taken() -> None:
    choice = choose(plan(form={"kind": "async", "rollout_gpus": 24}))
    assert choice.chosen.label == "async 24:40"
    assert choice.chosen.step_s.value > option(choose(plan()), Form.ASYNC).step_s.value


def test_a_form_that_cannot_run_names_one_that_can() -> None:
    with pytest.raises(ConfigError, match=r"form\.kind: async cannot run here .*nearest: 'colocated'"):
        choose(plan(gpus=1, gpu="B300", form={"kind": "async"}))


def test_a_form_that_fits_in_turns_alone_is_the_only_one() -> None:
    """64 H100 train a 70B together; split in any way, one side is too small."""
    choice = choose(plan("Llama-3-70B", 24, rollout={"gpus_per_instance": 4}, trainer={"model_parallel": 8}))
    assert {found.form for found in choice.options} == {Form.COLOCATED, Form.COLOCATED_ASYNC}
    assert all("cannot hold the trainer" in refused.why for refused in choice.refused)


@pytest.mark.parametrize(
    ("model", "gpus", "rollout"),
    [("DeepSeek-V3", 64, FP8), ("Llama-3-70B", 8, {"gpus_per_instance": 4}), ("Llama-3-8B", 1, {})],
)
def test_a_model_that_fits_nowhere_names_a_cluster_that_holds_it(
    model: str, gpus: int, rollout: dict[str, Any]
) -> None:
    of = plan(model, gpus, rollout=rollout, trainer={"model_parallel": min(gpus, 8)})
    with pytest.raises(ConfigError, match=r"cluster\.gpus: .* nearest: ") as caught:
        choose(of)
    more, instance = least_gpus(of, "H100"), least_instance(of, "H100")
    assert more is not None
    assert instance is not None
    assert f"nearest: {more} H100 with rollout.gpus_per_instance = {instance}" in caught.value.message
    assert choose(with_cluster(of, gpu="H100", gpus=more, instance=instance)).options
    fewer = more - of.cluster.gpus_per_node
    if fewer >= instance:
        with pytest.raises(ConfigError):
            choose(with_cluster(of, gpu="H100", gpus=fewer, instance=instance))


def test_a_bigger_gpu_is_named_where_one_is_enough() -> None:
    of = plan("DeepSeek-V3", 64, rollout=FP8, trainer={"model_parallel": 8})
    with pytest.raises(ConfigError, match=r"or 64 B300 with rollout\.gpus_per_instance = 4"):
        choose(of)
    assert choose(with_cluster(of, gpu="B300", gpus=64, instance=4)).options


def test_a_plan_remade_for_another_gpu_reads_that_gpus_data_sheet() -> None:
    assert plan_8b().gpu.name == "H100"
    assert with_cluster(plan_8b(), gpu="H200", gpus=8, instance=1).gpu.name == "H200"


def test_waiting_dropping_and_cutting_each_cost_something_of_their_own() -> None:
    """One update every 1/8 of a step: the longest response spans many versions."""
    many = {"trainer": {"updates": 8}}
    form = {"kind": "async", "rollout_gpus": 42}
    steps = {
        at_limit: choose(plan(**many, form={**form, "at_limit": at_limit, "max_lag": 2}))
        for at_limit in ("wait", "drop", "partial")
    }
    free = choose(plan(**many, form={**form, "at_limit": "wait", "max_lag": 100}))
    for at_limit, choice in steps.items():
        assert choice.chosen.step_s.value >= free.chosen.step_s.value, at_limit
    found = find([steps["drop"].chosen.step_s], "dropped_sample_share")
    assert 0.1 < found.value < 0.9
    assert find([steps["partial"].chosen.step_s], "step_continuation_s").value > 0


def test_a_limit_that_would_drop_nearly_everything_is_refused() -> None:
    choice = choose(plan(trainer={"updates": 64}, form={"at_limit": "drop", "max_lag": 1, "rollout_gpus": 42}))
    why = {refused.form: refused.why for refused in choice.refused}
    assert "form.max_lag: 1 drops" in why[Form.ASYNC]
    assert "at_limit = 'partial'" in why[Form.ASYNC]


def test_async_loses_to_one_step_when_it_syncs_more_than_the_tail_is_long() -> None:
    """With as many syncs, and no limit that binds, it never does (see test_choice_split)."""
    tree: dict[str, Any] = {"workload": no_tail(), "trainer": {"updates": 32}, "form": {"max_lag": 64}}
    often = choose(plan("Qwen2.5-32B", 128, rollout={"gpus_per_instance": 2}, **tree))
    assert option(often, Form.ASYNC).step_s.value > option(often, Form.ONE_STEP).step_s.value
    tree["form"]["sync_every"] = 32
    seldom = choose(plan("Qwen2.5-32B", 128, rollout={"gpus_per_instance": 2}, **tree))
    assert option(seldom, Form.ASYNC).step_s.value <= option(seldom, Form.ONE_STEP).step_s.value


def test_async_loses_to_one_step_when_its_limit_gives_more_than_the_tail_back() -> None:
    choice = choose(plan(form={"max_lag": 1}))
    assert option(choice, Form.ASYNC).step_s.value > option(choice, Form.ONE_STEP).step_s.value
    assert "async waits" in " ".join(choice.reasons)


def test_an_agentic_plan_weighs_its_sandboxes_and_its_kv() -> None:
    choice = choose(plan_agentic())
    assert choice.sandboxes is not None
    assert choice.residency is not None
    assert choice.sandboxes.releasable.value < choice.sandboxes.stateful.value
    assert choice.sandboxes.break_even_s.value == pytest.approx(10)
    assert choice.residency.offload_pays
    assert choice.residency.host_bytes.value > 1e12
    assert choose(plan_8b()).sandboxes is None
    assert choose(plan_8b()).residency is None


def test_reasons_name_settings_that_the_plan_should_change() -> None:
    large = plan("DeepSeek-V3", 512, rollout=FP8, form={"kind": "async", "max_lag": 8})
    agentic, dear = " ".join(choose(plan_agentic()).reasons), " ".join(choose(large).reasons)
    assert "(rollout.kv_offload) prefills" in agentic
    assert "restoring one takes less than 10 s" in agentic
    assert "save asynchronously" in dear
    assert "form.changed_share" in dear
    offloaded = plan_agentic().model_copy(update={"rollout": RolloutSection(kv_offload=True)})
    assert "kv_offload" not in " ".join(choose(offloaded).reasons)
    assert not any(word in " ".join(choose(plan_8b()).reasons) for word in ("sandboxes", "checkpoint", "weight sync"))


def test_all_figures_of_a_choice_have_a_name_of_their_own() -> None:
    for of in (plan_8b(), plan_agentic()):
        names = [figure.name for figure in choose(of).figures()]
        assert len(names) == len(set(names))


def test_a_micro_batch_that_fits_nowhere_names_the_largest_that_does() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.micro_batch_tokens: .* at most \d+, or raise") as caught:
        choose(plan(trainer={"micro_batch_tokens": 10_000_000}))
    most = int(caught.value.message.split("at most ")[1].split(",")[0])
    assert choose(plan(trainer={"micro_batch_tokens": most // 2})).options
