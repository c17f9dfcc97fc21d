"""The ledger of a pretraining run, for comparing it with the RL run that follows. Called by people through the library.

Pretraining has one phase, so that the whole ledger is FLOPs over sustained FLOP/s.
"""

from __future__ import annotations

from agentrl.plan.figure import Figure, Input, Quantity

_SIX = "Kaplan et al. 2020, Scaling laws for neural language models: 2 FLOPs forward and 4 backward a parameter"
TOKEN_ID_BYTES = Input("token_id_bytes", 2, "B", "uint16 token ids")


def training_flops(active_parameters: Quantity, tokens: Quantity) -> Figure:
    return Figure(
        "training_flops",
        6 * active_parameters.value * tokens.value,
        "FLOP",
        f"6 x {active_parameters.name} x {tokens.name}",
        (active_parameters, tokens),
        _SIX,
    )


def sustained_flops_per_s(gpus: Quantity, peak_flops_per_s: Quantity, mfu: Quantity) -> Figure:
    return Figure(
        "sustained_flops_per_s",
        gpus.value * peak_flops_per_s.value * mfu.value,
        "FLOP/s",
        f"{gpus.name} x {peak_flops_per_s.name} x {mfu.name}",
        (gpus, peak_flops_per_s, mfu),
    )


def training_run_s(flops: Quantity, flops_per_s: Quantity) -> Figure:
    """At perfect availability; `failures.run_with_failures_s` adds what goes wrong."""
    return Figure(
        "training_run_s",
        flops.value / flops_per_s.value,
        "s",
        f"{flops.name} / {flops_per_s.name}",
        (flops, flops_per_s),
    )


def tokens_per_s(flops_per_s: Quantity, active_parameters: Quantity) -> Figure:
    """What the data pipeline must deliver."""
    return Figure(
        "tokens_per_s",
        flops_per_s.value / (6 * active_parameters.value),
        "tokens/s",
        f"{flops_per_s.name} / (6 x {active_parameters.name})",
        (flops_per_s, active_parameters),
        _SIX,
    )


def token_bytes(tokens: Quantity, bytes_per_token: Quantity = TOKEN_ID_BYTES) -> Figure:
    """Of a corpus of token ids; of a second of it, when given a rate."""
    return Figure(
        "token_bytes",
        tokens.value * bytes_per_token.value,
        "B/s" if tokens.unit.endswith("/s") else "B",
        f"{tokens.name} x {bytes_per_token.name}",
        (tokens, bytes_per_token),
    )
