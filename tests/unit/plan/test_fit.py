"""The fit of measured runs: rates come back, and the difference is found in the phase that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.core.errors import ConfigError
from agentrl.plan.fit import Measured, Run, fit, settings
from agentrl.plan.model import model_named

MODEL = model_named("Llama-3-8B")
N = MODEL.active_parameters


def steps(count: int, overlapped: bool) -> list[Measured]:
    """Passes at 40 and 30 PFLOP/s, 1 s of fixed cost in the update, generation at 50,000 tokens/s."""
    found = []
    for at in range(count):
        tokens = 1e6 * (1 + 0.3 * (at % 5))
        forward, update = 2 * N * tokens / 40e15, 1 + 6 * N * tokens / 30e15
        trainer = 0.1 * tokens / 1e6 + forward + update + 5 + 2 + 3
        generation = 0.8 * tokens / 50_000
        wait = max(0.0, generation - trainer) if overlapped else generation
        found.append(Measured(tokens, 0.8 * tokens, wait, 0.1 * tokens / 1e6, forward, update, 5, 2, 3, trainer + wait))
    return found


@pytest.mark.parametrize("overlapped", [True, False])
def test_rates_and_fixed_costs_come_back(overlapped: bool) -> None:
    found = fit(Run("r", MODEL, overlapped, 2.0, steps(21, overlapped)))
    phases = {phase.name: phase for phase in found.phases}
    rates = {name: phase.rate.value for name, phase in phases.items() if phase.rate is not None}
    assert rates["forward"] == pytest.approx(40e15)
    assert rates["update"] == pytest.approx(30e15)
    assert phases["update"].fixed_s == pytest.approx(1)
    assert rates["wait"] == pytest.approx(50_000)
    assert rates["apply"] == pytest.approx(MODEL.parameters * 2 / 3)
    assert found.step.error == pytest.approx(0, abs=1e-6)
    assert (found.fitted, found.compared, found.bound) == (10, 10, True)


def test_the_difference_sits_in_the_phase_that_changed() -> None:
    # Steps that are compared, not those that are fitted, load weights slowly.
    slow = [
        replace(step, apply_s=step.apply_s + 4, step_s=step.step_s + 4) if at % 2 == 0 else step
        for at, step in enumerate(steps(21, overlapped=False))
    ]
    found = fit(Run("r", MODEL, False, 2.0, slow))
    assert found.worst.name == "apply"
    assert found.worst.predicted_s == pytest.approx(3)
    assert found.worst.measured_s == pytest.approx(7)
    assert found.step.measured_s - found.step.predicted_s == pytest.approx(4)


def test_a_trainer_that_never_waits_bounds_generation_only() -> None:
    idle = [replace(step, wait_s=0.0, step_s=step.trainer_s) for step in steps(21, overlapped=True)]
    assert not fit(Run("r", MODEL, True, 2.0, idle)).bound


def test_settings_are_shares_of_the_plans_gpus() -> None:
    found = fit(Run("r", MODEL, False, 2.0, steps(21, overlapped=False)))
    lines = settings(found, peak_flops=1e15, gpus=100)
    assert lines[:2] == ("forward_mfu = 0.4", "train_mfu = 0.3")
    assert [line.split(" =")[0] for line in lines[2:]] == ["broadcast_bytes_per_s", "checkpoint_bytes_per_s"]


def test_too_short_a_run_says_so() -> None:
    with pytest.raises(ConfigError, match="run short: 3 steps are too few to fit; at least 7"):
        fit(Run("short", MODEL, True, 2.0, steps(3, overlapped=True)))
