"""The ledger of a pretraining run, for comparing the RL run with it. Called by `choose`.

Pretraining has one phase, so that the whole ledger is FLOPs over sustained FLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.plan.figure import Figure, Input, Quantity, share_of
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given

_SIX = "Kaplan et al. 2020, Scaling laws for neural language models: 2 FLOPs forward and 4 backward a parameter"
TOKENS_PER_PARAMETER = Input("tokens_per_parameter", 20, "tokens", "Hoffmann et al. 2022")
TOKEN_ID_BYTES = Input("token_id_bytes", 2, "B", "uint16 token ids")
WIDE_TOKEN_ID_BYTES = Input("token_id_bytes", 4, "B", "uint32 token ids: over 65,536 in the vocabulary")


@dataclass(frozen=True)
class Pretraining:
    """The model pretrained on the same GPUs, at the trainer's MFU, on 20 tokens a parameter."""

    tokens: Figure
    corpus_bytes: Figure
    flops: Figure
    flops_per_s: Figure
    tokens_per_s: Figure
    """What a data pipeline has to deliver; in RL the rollout is the data pipeline."""
    run_s: Figure
    run_flops: Figure
    """Of the RL run."""
    run_share: Figure
    """The RL run's FLOPs as a share of pretraining's."""
    time_share: Figure
    """The same in seconds: more than in FLOPs, since RL reaches a lower MFU."""


def pretraining(plan: PlanInput, step_flops: Quantity, run_s: Quantity) -> Pretraining:
    """`run_s`: of the RL run, failures included."""
    given, steps = Given(plan), Input("steps", plan.run.steps, "", "[run]")
    parameters, each = given.parameters, TOKENS_PER_PARAMETER
    tokens = Figure(
        "pretraining_tokens", parameters.value * each.value, "tokens", f"{parameters.name} x {each.name}",
        (parameters, each),
    )  # fmt: skip
    size = TOKEN_ID_BYTES if plan.shape.vocabulary <= 2**16 else WIDE_TOKEN_ID_BYTES
    flops = training_flops(given.active_parameters, tokens)
    rate = sustained_flops_per_s(given.gpus("gpus", plan.cluster.gpus), given.peak_flops, given.assumed("train_mfu"))
    whole = training_run_s(flops, rate)
    value, formula = steps.value * step_flops.value, f"{steps.name} x {step_flops.name}"
    run_flops = Figure("run_flops", value, "FLOP", formula, (steps, step_flops))
    return Pretraining(
        tokens, token_bytes(tokens, size), flops, rate, tokens_per_s(rate, given.active_parameters), whole, run_flops,
        share_of("run_of_pretraining_flops", run_flops, flops), share_of("run_of_pretraining_s", run_s, whole),
    )  # fmt: skip


def training_flops(active_parameters: Quantity, tokens: Quantity) -> Figure:
    return Figure(
        "pretraining_flops",
        6 * active_parameters.value * tokens.value,
        "FLOP",
        f"6 x {active_parameters.name} x {tokens.name}",
        (active_parameters, tokens),
        _SIX,
    )


def sustained_flops_per_s(gpus: Quantity, peak_flops_per_s: Quantity, mfu: Quantity) -> Figure:
    return Figure(
        "pretraining_flops_per_s",
        gpus.value * peak_flops_per_s.value * mfu.value,
        "FLOP/s",
        f"{gpus.name} x {peak_flops_per_s.name} x {mfu.name}",
        (gpus, peak_flops_per_s, mfu),
    )


def training_run_s(flops: Quantity, flops_per_s: Quantity) -> Figure:
    """At perfect availability; `failures.run_with_failures_s` adds what goes wrong."""
    return Figure(
        "pretraining_s",
        flops.value / flops_per_s.value,
        "s",
        f"{flops.name} / {flops_per_s.name}",
        (flops, flops_per_s),
    )


def tokens_per_s(flops_per_s: Quantity, active_parameters: Quantity) -> Figure:
    """What the data pipeline must deliver."""
    return Figure(
        "pretraining_tokens_per_s",
        flops_per_s.value / (6 * active_parameters.value),
        "tokens/s",
        f"{flops_per_s.name} / (6 x {active_parameters.name})",
        (flops_per_s, active_parameters),
        _SIX,
    )


def token_bytes(tokens: Quantity, bytes_per_token: Quantity = TOKEN_ID_BYTES) -> Figure:
    """Of a corpus of token ids; of a second of it, when given a rate."""
    return Figure(
        "corpus_bytes",
        tokens.value * bytes_per_token.value,
        "B/s" if tokens.unit.endswith("/s") else "B",
        f"{tokens.name} x {bytes_per_token.name}",
        (tokens, bytes_per_token),
    )
