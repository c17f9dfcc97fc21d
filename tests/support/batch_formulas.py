"""Formulas of the exercise set about a batch that is there: its lags and its importance weights.

A run measures these (`train/lag_*`, `train/ess_ratio`), a plan does not forecast them; only rows of the exercise set
call them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.plan.figure import Figure, Quantity, total

_KISH = "Kish 1965, Survey sampling"


def version_lags(trainer_version: Quantity, versions: Sequence[Quantity]) -> tuple[Figure, ...]:
    """Versions between sampling and training, one for each rollout."""
    return tuple(
        Figure(
            f"lag_{at}",
            trainer_version.value - version.value,
            "versions",
            f"{trainer_version.name} - {version.name}",
            (trainer_version, version),
        )
        for at, version in enumerate(versions)
    )


def mean_lag(lags: Sequence[Quantity]) -> Figure:
    summed = total("lag_sum", "versions", lags)
    return Figure("mean_lag", summed.value / len(lags), "versions", f"lag_sum / {len(lags)}", (summed,))


def max_lag(lags: Sequence[Quantity]) -> Figure:
    names = ", ".join(lag.name for lag in lags)
    return Figure("max_lag", max(lag.value for lag in lags), "versions", f"max({names})", tuple(lags))


def effective_samples(weights: Sequence[Quantity]) -> Figure:
    """How many unweighted samples carry as much information as these importance weights leave."""
    first = sum(weight.value for weight in weights)
    second = sum(weight.value**2 for weight in weights)
    return Figure(
        "effective_samples",
        first**2 / second if second else 0.0,
        "",
        "(sum of weights)^2 / sum of squared weights",
        tuple(weights),
        _KISH,
    )


def effective_share(effective: Quantity, samples: Quantity) -> Figure:
    return Figure(
        "effective_share",
        effective.value / samples.value,
        "share",
        f"{effective.name} / {samples.name}",
        (effective, samples),
        _KISH,
    )
