"""000: the drill set. Drills without a number to compute (11.2, 11.3, 11.5 to 11.9, 11.13, 11.15) have no row."""

from __future__ import annotations

from seed_rows import Row, Unreproduced

from agentrl.plan.choice.barrier import length_utilization, speedup
from agentrl.plan.choice.failures import cluster_mtbf_s, failures
from agentrl.plan.choice.pretraining import (
    sustained_flops_per_s,
    token_bytes,
    tokens_per_s,
    training_flops,
    training_run_s,
)
from agentrl.plan.choice.synchronization import sync_share
from agentrl.plan.figure import Figure, Input

HOUR, DAY = 3600, 86_400
ACTIVE = Input("active_parameters", 40e9)
CORPUS = Input("tokens", 15e12, "tokens")
RUN = Input("run_s", 14.5 * DAY, "s")


def _transfer_gain(broadcast_s: float, point_to_point_s: float) -> Figure:
    return speedup(Input("broadcast_s", broadcast_s, "s"), Input("point_to_point_s", point_to_point_s, "s"))


def _useful() -> Figure:
    return length_utilization(Input("mean_tokens", 4000, "tokens"), Input("longest_tokens", 16_384, "tokens"))


def _tax() -> Figure:
    return sync_share(Input("sync_s", 53, "s"), Input("step_s", 180, "s"))


def _rate() -> Figure:
    return sustained_flops_per_s(Input("gpus", 8192), Input("peak_flops_per_s", 990e12), Input("mfu", 0.40))


def _mtbf() -> Figure:
    return cluster_mtbf_s(Input("gpu_mtbf_s", 50_000 * HOUR, "s"), Input("gpus", 8192))


ROWS = [
    Row("000 11.4 efficiency 24 %", 0.24, _useful),
    Row("000 11.4 three quarters idle", 0.75, lambda: 1 - _useful().value),
    Row("000 11.10 Qwen3-235B 3.4x", 3.4, lambda: _transfer_gain(10.7, 3.2)),
    Row("000 11.10 DeepSeek-V3.2 6.9x", 6.9, lambda: _transfer_gain(58.3, 8.5)),
    Row("000 11.10 Kimi-K2 7.4x", 7.4, lambda: _transfer_gain(53.3, 7.2)),
    Row("000 11.11 idle share 29 %", 0.29, _tax),
    Row("000 11.16 FLOPs 3.6e24", 3.6e24, lambda: training_flops(ACTIVE, CORPUS), relative=1e-9),
    Row("000 11.16 rate 3.24e18 FLOP/s", 3.24e18, _rate),
    Row("000 11.16 run 12.9 days", 12.9 * DAY, lambda: training_run_s(training_flops(ACTIVE, CORPUS), _rate())),
    Row("000 11.17 MTBF 6.1 h", 6.1 * HOUR, _mtbf),
    Row("000 11.17 failures 57", 57, lambda: failures(RUN, _mtbf())),
    Row("000 11.18 tokens a second 13.5M", 13.5e6, lambda: tokens_per_s(_rate(), ACTIVE)),
    Row("000 11.18 corpus 30 TB", 30e12, lambda: token_bytes(CORPUS), relative=1e-9),
    Row("000 11.18 token ids a second 27 MB", 27e6, lambda: token_bytes(tokens_per_s(_rate(), ACTIVE))),
]

UNREPRODUCED = [
    Unreproduced(
        "000 11.1 rollout 60 to 80 % of the wall clock", "60-80 %", "a range over published reports", measured=True
    ),
    Unreproduced(
        "000 11.11 $1.6M a year",
        "$1.6M",
        "the drill gives no price; 29 % of 256 GPUs are $1.6M at $2.50 a GPU hour, the exact 75 GPUs at $2.42",
    ),
    Unreproduced(
        "000 11.11 worth 70 GPUs",
        "70",
        "29 % of the 256 GPUs are 75; 70 would be 27 %",
    ),
    Unreproduced(
        "000 11.12 split drifts from 62:38 to 77:23",
        "62:38, 77:23",
        "the drill gives no lengths, batch or machines from which the two ratios would follow",
    ),
    Unreproduced(
        "000 11.14 clip fraction 5 %, log ratios 1e-7 and 1e-3",
        "5 %, 1e-7, 1e-3",
        "thresholds from experience with kernels, nothing to compute",
        measured=True,
    ),
    Unreproduced(
        "000 11.16 run 14.5 days in practice",
        "14.5 days",
        "an availability of 89 % that the drill neither prints nor derives: its own 57 failures of 20 minutes and half "
        "a checkpoint interval each make 13.9 days",
    ),
    Unreproduced(
        "000 11.17 checkpoint every 10 to 15 minutes",
        "10-15 min",
        "the drill gives no cost of a checkpoint; by Young's formula 8 to 18 s would lead there",
    ),
    Unreproduced(
        "000 11.18 27 GB/s, a few MB/s a rank",
        "27 GB/s",
        "the answer is wrong by a thousand: 13.5 M tokens of 2 bytes are 27 MB/s (the row above), 3 kB/s a rank; its "
        "own 30 TB over its own 12.9 days say so too",
    ),
]
