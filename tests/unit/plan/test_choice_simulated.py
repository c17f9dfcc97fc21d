"""The closed forms of streaming steps against the simulator: times and lags within 3 percent, shares dropped within 6
points."""

from __future__ import annotations

from typing import Any

import pytest
from seed_plans import REASONING, plan_8b

from agentrl.plan.choice import Form, choose
from agentrl.plan.inputs import FormSection
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.forecast import parameters_of
from agentrl.plan.simulate import simulate
from agentrl.plan.workload import Lengths

HEAVY = {"kind": "lognormal", "mean": 8192, "sigma": 1.5, "cap": 131_072}


@pytest.mark.parametrize(
    ("lengths", "at_limit", "max_lag"),
    [
        (REASONING, "wait", 1),
        (REASONING, "wait", 2),
        (REASONING, "wait", 8),
        (HEAVY, "wait", 2),
        (HEAVY, "wait", 4),
        (HEAVY, "wait", 16),
        (REASONING, "drop", 1),
        (REASONING, "drop", 2),
        (REASONING, "drop", 3),
        (HEAVY, "drop", 4),
        (HEAVY, "drop", 6),
        (HEAVY, "drop", 8),
        (REASONING, "partial", 8),
    ],
    ids=lambda given: given.get("cap") if isinstance(given, dict) else given,
)
def test_an_async_step(lengths: dict[str, Any], at_limit: str, max_lag: int) -> None:
    of = plan_8b()
    work = of.workload.model_copy(update={"response_tokens": Lengths.model_validate(lengths)})
    form = FormSection.model_validate({"kind": "async", "at_limit": at_limit, "max_lag": max_lag})
    of = of.model_copy(update={"workload": work, "form": form})
    option = choose(of).chosen
    assert option.form is Form.ASYNC
    assert option.staleness is not None
    result = simulate(parameters_of(Ledger(of), option, steps=24))
    assert option.step_s.value == pytest.approx(result.step_s, rel=0.03)
    if at_limit == "drop":
        assert option.staleness.cut is not None
        assert option.staleness.cut.dropped_share.value == pytest.approx(result.dropped_share, abs=0.06)
    elif max_lag >= 8:
        assert option.staleness.mean_lag.value == pytest.approx(result.lag_mean, rel=0.03)
