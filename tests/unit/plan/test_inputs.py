"""Plan files: what is refused names the field and the nearest valid choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.core.errors import ConfigError
from agentrl.plan.inputs import load
from agentrl.plan.simulate.draws import draw
from agentrl.plan.workload import Lengths

GOOD = """
[model]
name = "Llama-3-8B"
[workload]
prompts = 512
samples = 16
response_tokens = { kind = "lognormal", mean = 8192, cap = 32768 }
[cluster]
gpu = "H100"
gpus = 64
"""


def _load(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    load(path)


def test_a_plan_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(GOOD)
    plan = load(path)
    assert plan.workload.episodes == 8192
    assert plan.gpu.name == "H100"
    assert plan.gpu_usd_per_hour == plan.gpu.usd_per_hour
    path.write_text(GOOD + "gpu_usd_per_hour = 1.5\n")
    assert load(path).gpu_usd_per_hour == 1.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mean = 8192", "mean = -1", r"workload\.response_tokens\.mean: .*greater than or equal to 0"),
        ("mean = 8192", "mean = 40000", "mean: 40000 exceeds the cap of 32768"),
        ("mean = 8192", "mean = inf", r"workload\.response_tokens\.mean: .*finite"),
        ("mean = 8192", "mean = nan", r"workload\.response_tokens\.mean: .*finite"),
        ("mean = 8192", "mean = 0", "workload: .*response_tokens: .*at least 1"),
        ("prompts = 512", "prompts = 0", r"workload\.prompts: .*greater than 0"),
        ("prompts = 512", "promts = 512", r"unknown key 'workload\.promts'; did you mean 'workload\.prompts'"),
        ('gpu = "H100"', 'gpu = "H1000"', r"cluster\.gpu: unknown GPU 'H1000'; nearest is 'H100'"),
        ('gpu = "H100"', 'gpu = "H100"\ncpu_host = "cpu80"', "unknown CPU host 'cpu80'; nearest is 'cpu-80'"),
        ('name = "Llama-3-8B"', 'name = "Lama-3-8B"', "unknown model 'Lama-3-8B'; nearest is 'Llama-3-8B'"),
        ('name = "Llama-3-8B"', "", "give either a name or a path"),
        (
            "[cluster]",
            "[rollout]\ngpus_per_instance = 128\n[cluster]",
            "128 exceeds the 64 GPUs of the rollout; at most 64",
        ),
        ("[cluster]", "[form]\nrollout_gpus = 64\n[cluster]", "64 leaves no GPU of 64 to the trainer; at most 63"),
        ("[cluster]", "[rollout]\nin_flight = 9000\n[cluster]", "9000 exceeds the 8192 episodes of a step; at most"),
        ("[cluster]", "[trainer]\nmodel_parallel = 128\n[cluster]", r"trainer\.model_parallel: .* at most 64"),
        (
            "[cluster]",
            "[trainer]\nmodel_parallel = 8\npipeline_parallel = 16\n[cluster]",
            r"trainer\.pipeline_parallel: .* at most 8",
        ),
        ("[cluster]", "[trainer]\npipeline_parallel = 33\n[cluster]", "33 stages of 32 layers; at most 32"),
        ("[cluster]", "[rollout]\nin_flight = 'windows'\n[cluster]", r"rollout\.in_flight: .* nearest is 'window'"),
        ("[cluster]", "[rollout]\nin_flight = 0\n[cluster]", r"rollout\.in_flight: 0 is neither .* nearest is 1"),
        ("[cluster]", "[rollout]\nin_flight = 29.7\n[cluster]", r"in_flight: 29.7 is neither .* nearest is 30"),
        ("[cluster]", "[rollout]\nin_flight = inf\n[cluster]", r"rollout\.in_flight: inf is neither .* nearest is"),
        ("[cluster]", "[rollout]\nin_flight = true\n[cluster]", r"rollout\.in_flight: True is neither"),
        ("mean = 8192", "mean = 8192, sigma = 50", r"response_tokens\.sigma: .*less than or equal to 5"),
        ("[cluster]", "[form]\nkind = 'asink'\n[cluster]", r"form\.kind"),
        ("prompts", "prompts = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, GOOD.replace(old, new, 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 1e5), st.floats(1.05, 50), st.floats(0.1, 2.5))
def test_the_mean_is_that_after_the_cap(mean: float, times: float, sigma: float) -> None:
    lengths = Lengths(kind="lognormal", mean=mean, cap=mean * times, sigma=sigma)
    # The mean is the integral of the quantiles.
    shares = [(index + 0.5) / 1000 for index in range(1000)]
    quantiles = [lengths.quantile(share) for share in shares]
    assert sum(quantiles) / 1000 == pytest.approx(mean, rel=0.02)
    assert sum((value - mean) ** 2 for value in quantiles) / 1000 == pytest.approx(lengths.variance, rel=0.1)
    assert quantiles == sorted(quantiles)
    assert quantiles[-1] <= lengths.longest(1e6) <= mean * times


def test_draws_have_the_mean_and_keep_the_cap() -> None:
    lengths = Lengths(kind="lognormal", mean=1000, cap=4000)
    drawn = draw(lengths, 1, 0, np.arange(20_000))
    assert drawn.mean() == pytest.approx(1000, rel=0.02)
    assert drawn.max() == 4000
    assert (draw(lengths, 1, 0, np.array([7, 3])) == drawn[[7, 3]]).all()


def test_observed_lengths_are_taken_as_they_are() -> None:
    lengths = Lengths(kind="empirical", values=(1, 2, 3, 10), cap=6)
    assert lengths.mean == 3
    assert lengths.variance == pytest.approx((4 + 1 + 0 + 9) / 4)
    assert lengths.longest(100) == 6
    assert set(draw(lengths, 1, 0, np.arange(40))) == {1, 2, 3, 6}
    with pytest.raises(ValidationError, match="values"):
        Lengths(kind="fixed", mean=3, values=(1.0,))


def test_the_longest_of_many_sums_is_bounded() -> None:
    lengths = Lengths(kind="lognormal", mean=30, cap=600)
    assert lengths.longest_sum(1, 4000) == lengths.longest(4000)
    longest = lengths.longest_sum(20, 4000)
    assert 20 * 30 + 500 < longest <= 20 * 600
    assert Lengths(mean=30).longest_sum(20, 4000) == 600
