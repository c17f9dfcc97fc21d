"""A plan's figures, forms and simulations as JSON, for programs. Called by the CLI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.plan.choice.choose import Choice
from agentrl.plan.figure import Figure
from agentrl.plan.ledger import Ledger
from agentrl.plan.report.tables import sections
from agentrl.plan.simulate import Result


def as_json(plans: Sequence[Mapping[str, Any]]) -> str:
    """One plan's object, or an array of several: one document in either case."""
    return json.dumps(plans[0] if len(plans) == 1 else plans, indent=2, allow_nan=False)


def tree_of(ledger: Ledger, choice: Choice, results: Sequence[Result]) -> Mapping[str, Any]:
    return {
        "name": ledger.plan.name,
        "chosen": choice.chosen.form.value,
        "reasons": choice.reasons,
        "forms": {
            option.form.value: {
                "step_s": option.step_s.value,
                "mfu": option.mfu.value,
                "gpu_usd": option.usd.value,
                "rollout_gpus": option.split.rollout_gpus if option.split else ledger.plan.cluster.gpus,
                "trainer_gpus": option.trainer_gpus,
            }
            for option in choice.options
        },
        "refused": {refused.form.value: refused.why for refused in choice.refused},
        "figures": {
            title: {figure.name: _figure(figure) for figure in figures}
            for title, figures in sections(ledger, choice).items()
        },
        "simulation": [_result(result) for result in results],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    value = figure.value if math.isfinite(figure.value) else None
    return {"value": value, "unit": figure.unit, "formula": figure.formula, "source": figure.source}


def _result(result: Result) -> dict[str, Any]:
    return {
        "form": result.parameters.form.value,
        "policy": result.parameters.policy.value,
        "seed": result.parameters.seed,
        "steps": len(result.steps),
        "step_s": result.step_s,
        "generation_s": result.generation_s,
        "tail_share": result.tail_share,
        "trainer_idle": result.trainer_idle,
        "idle_share": np.quantile(result.idle_share, (0.1, 0.5, 0.9)).tolist(),
        "place_use": result.place_use,
        "lag_mean": result.lag_mean,
        "token_lag_mean": result.token_lag_mean,
        "dropped_share": result.dropped_share,
        "continued_tokens": result.continued_tokens,
        "sandboxes_peak": result.sandboxes.peak,
        "sandboxes_mean": result.sandboxes.mean,
        "lag_counts": result.tally.trained.sum(axis=0).tolist(),
    }
