"""001: the exercise set. P01, P04, P11 and P12 ask for words or a matching; of code tasks there are none.

P02's first formula stands in the answers of P03 and P05 to P10 as well, in place of their own.
"""

from __future__ import annotations

from batch_formulas import effective_samples, effective_share, max_lag, mean_lag, version_lags
from seed_rows import Row, Unreproduced

from agentrl.plan.choice.barrier import barrier_utilization, pipelined_s, queue_load, sequential_s, speedup
from agentrl.plan.choice.checkpoints import young_interval_s
from agentrl.plan.figure import Figure, Input
from agentrl.plan.ledger.kv import kv_bytes, kv_bytes_per_token
from agentrl.plan.ledger.memory import state_bytes

GIB = 2**30
GENERATE, TRAIN, BATCHES = Input("generate_s", 45, "s"), Input("train_s", 30, "s"), Input("batches", 8)


def _state() -> Figure:
    sizes = (Input("weight_bytes", 2, "B"), Input("gradient_bytes", 2, "B"), Input("moment_bytes", 8, "B"))
    return state_bytes(Input("parameters", 7e9), *sizes)


def _kv() -> Figure:
    per_token = kv_bytes_per_token(Input("layers", 32), Input("kv_values", 2 * 8 * 128), Input("value_bytes", 2, "B"))
    return kv_bytes("kv_bytes", Input("tokens", 16 * 8192, "tokens"), per_token)


def _pipeline_gain() -> Figure:
    return speedup(sequential_s(GENERATE, TRAIN, BATCHES), pipelined_s(GENERATE, TRAIN, BATCHES))


def _ess() -> Figure:
    return effective_samples([Input(f"weight_{at}", weight) for at, weight in enumerate((1, 1, 1, 5))])


def _lags() -> tuple[Figure, ...]:
    versions = [Input(f"version_{at}", version) for at, version in enumerate((108, 109, 110, 110))]
    return version_lags(Input("trainer_version", 112), versions)


def _interval() -> Figure:
    return young_interval_s(Input("checkpoint_s", 120, "s"), Input("mtbf_s", 8 * 3600, "s"))


ROWS = [
    Row("001 P02 GB", 84e9, _state, relative=0, rounded_to=2e3),
    Row("001 P02 GiB", 78.23 * GIB, _state, relative=0, rounded_to=0.01 * GIB),
    Row("001 P03 GiB", 16 * GIB, _kv, relative=0, rounded_to=2e-6 * GIB),
    Row("001 P05 sequential", 600, lambda: sequential_s(GENERATE, TRAIN, BATCHES), relative=0, rounded_to=2e-6),
    Row("001 P05 pipeline", 390, lambda: pipelined_s(GENERATE, TRAIN, BATCHES), relative=0, rounded_to=2e-6),
    Row("001 P05 speedup", 1.538, _pipeline_gain, relative=0, rounded_to=2e-3),
    Row(
        "001 P06 utilization",
        0.5,
        lambda: barrier_utilization([Input(f"rollout_{at}_s", s, "s") for at, s in enumerate((4, 4, 4, 12))]),
        relative=0,
        rounded_to=2e-6,
    ),
    Row(
        "001 P07 rho",
        0.8,
        lambda: queue_load(Input("arrivals_per_s", 8000), Input("served_per_s", 10_000)),
        relative=0,
        rounded_to=2e-6,
    ),
    Row("001 P08 ESS", 2.2857, _ess, relative=0, rounded_to=2e-4),
    Row(
        "001 P08 normalized ESS",
        0.5714,
        lambda: effective_share(_ess(), Input("samples", 4)),
        relative=0,
        rounded_to=2e-4,
    ),
    *(
        Row(f"001 P09 lag of rollout {at + 1}", lag, lambda at=at: _lags()[at], relative=0)
        for at, lag in enumerate((4, 3, 2, 2))
    ),
    Row("001 P09 mean lag", 2.75, lambda: mean_lag(_lags()), relative=0, rounded_to=2e-6),
    Row("001 P09 maximum lag", 4, lambda: max_lag(_lags()), relative=0),
    # Not in the answer, which shows P02's; from the question and its formula.
    Row("001 P10 seconds", 2629.07, _interval, relative=0, rounded_to=0.02),
    Row("001 P10 minutes", 43.82 * 60, _interval, relative=0, rounded_to=0.02 * 60),
]

UNREPRODUCED = [
    *(
        Unreproduced(
            f"001 {question} first formula of the answer",
            "2 + 2 + 8 = 12 bytes",
            f"it is P02's formula, not {question}'s; the rows of {question} are computed from the question",
        )
        for question in ("P03", "P05", "P06", "P07", "P08", "P09", "P10")
    ),
    Unreproduced(
        "001 P10 second formula of the answer",
        "84 GB",
        "it is P02's result: the answer shows neither the formula with its numbers nor an interval",
    ),
]
