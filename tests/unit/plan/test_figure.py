"""Derivations: every number can be followed back to what was given."""

from __future__ import annotations

import pytest
from seed_plans import plan_8b

from agentrl.core.errors import ConfigError
from agentrl.plan.figure import Figure, Input, explain, find, show, total
from agentrl.plan.ledger import Ledger


def test_explain_prints_formula_numbers_and_sources() -> None:
    text = explain(Ledger(plan_8b()).find("decode_step_s"))
    assert text.startswith("decode_step_s = 35.6 ms\n")
    assert "Pope et al. 2022" in text
    assert "gpu_memory_bytes = 80 GB   <- NVIDIA H100 SXM data sheet" in text
    assert "prompt_tokens = 500 tokens   <- [workload]" in text


def test_a_part_is_derived_once() -> None:
    one = Figure("one", 1, "s", "given", (Input("leaf", 1, "s"),))
    text = explain(total("two", "s", (one, one)))
    assert text.count("leaf = 1 s") == 1
    assert "one = 1 s   (above)" in text


def test_an_unknown_name_gets_the_nearest() -> None:
    ledger = Ledger(plan_8b())
    assert find(ledger.figures(), "gpu_memory_bytes").value == 80e9
    with pytest.raises(ConfigError, match="no figure 'decode_step'; did you mean 'decode_step_s'"):
        ledger.find("decode_step")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (9.331e12, "B", "9.33 TB"),
        (0.0356, "s", "35.6 ms"),
        (810.13, "s", "810.1 s"),
        (0.1326, "share", "13.3 %"),
        (6.8e18, "FLOP", "6.8 EFLOP"),
        (67.1e6, "tokens", "67.1 M tokens"),
        (80_000, "runs", "80,000 runs"),
        (92, "", "92"),
    ],
)
def test_show(value: float, unit: str, text: str) -> None:
    assert show(Input("x", value, unit)) == text
