"""003, chapter 5 part A: the ten questions with worked answers (question 5, on splits, is in the table of forms)."""

from __future__ import annotations

from functools import cache

from seed_plans import plan
from seed_rows import Row, Unreproduced

from agentrl.plan.choice.staleness import typical_lag
from agentrl.plan.choice.synchronization import sync_bubble
from agentrl.plan.figure import Figure, Input
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import Flops, Ledger, Rollout, Sandboxes, Sync, TrainerMemory
from agentrl.plan.ledger.decode import tail_free_gain
from agentrl.plan.ledger.sync import transfer_s


@cache
def _q1() -> Flops:
    return Flops(plan("Llama-3-8B", 64, prompts=256, samples=32, prompt_tokens=500, response_tokens=4096,
                      trainer={"reference": True}))  # fmt: skip


@cache
def _q2(gpu: str) -> Rollout:
    return Rollout(plan("Llama-3-8B", 8, gpu=gpu), 8)


@cache
def _q3(memory_share: float) -> Rollout:
    setting = {"gpus_per_instance": 2, "memory_share": memory_share}
    return Rollout(plan("Qwen2.5-32B", 8, prompt_tokens=1024, rollout=setting), 8)


def _q4_gain() -> Figure:
    return tail_free_gain(Input("tail_share", 0.7), Input("generation_s", 1000, "s"), Input("training_s", 300, "s"))


def _q6(gpus: int) -> float:
    memory = TrainerMemory(plan("Llama-3-70B", gpus), gpus)
    return memory.whole_state.value / gpus


@cache
def _q7() -> Sync:
    return Sync(plan("Qwen3-235B-A22B", 64, rollout={"gpus_per_instance": 8}), 8)


def _q7_at(rate: float) -> Figure:
    return transfer_s("sync_nccl_s", _q7().bytes, Input("broadcast_bytes_per_s", rate, "B/s"))


def _q8(sync_s: float, updates: int) -> Figure:
    return sync_bubble(Input("sync_s", sync_s, "s"), Input("updates", updates), Input("update_s", 100, "s"))


def _q9(generation_s: float) -> Figure:
    return typical_lag(Input("generation_s", generation_s, "s"), Input("wait_s", 0, "s"), Input("interval_s", 200, "s"))


def _q10_plan() -> PlanInput:
    return plan(
        "Llama-3-8B", 32, prompts=1000, samples=4, response_tokens=400, turns=30, environment_s=20,
        environment_cores=2, turn_generation_s=10, rollout_target_s=1200,
    )  # fmt: skip


@cache
def _q10() -> Sandboxes:
    return Ledger(_q10_plan()).sandboxes


ROWS = [
    Row("003 part A q1 response tokens", 3.36e7, lambda: _q1().tokens.sampled),
    Row("003 part A q1 forward tokens", 3.77e7, lambda: _q1().tokens.all),
    Row("003 part A q1 step FLOPs", 3.6e18, lambda: _q1().step),
    Row("003 part A q1 decode FLOPs", 0.54e18, lambda: _q1().decode),
    Row("003 part A q1 decode share", 0.15, lambda: _q1().decode.value / _q1().step.value),
    Row("003 part A q2 H200 step", 0.044, lambda: _q2("H200").full_memory_step),
    Row("003 part A q2 H100 step", 0.036, lambda: _q2("H100").full_memory_step),
    Row(
        "003 part A q2 memory of the H200 is 76 % more",
        1.76,
        lambda: _q2("H200").given.memory_bytes.value / _q2("H100").given.memory_bytes.value,
    ),
    Row(
        "003 part A q2 bandwidth of the H200 is 43 % more",
        1.43,
        lambda: _q2("H200").given.memory_rate.value / _q2("H100").given.memory_rate.value,
    ),
    Row(
        "003 part A q3 bytes of a sequence in flight",
        1.3e9,
        lambda: _q3(0.9).context.value * _q3(0.9).kv_per_token.value,
        rounded_to=0.1e9,
    ),
    Row("003 part A q3 KV a token 256 KiB", 256 * 1024, lambda: _q3(0.9).kv_per_token, relative=0),
    Row("003 part A q3 weights 66 GB", 66e9, lambda: _q3(0.9).weight_bytes),
    Row("003 part A q3 pool at 0.9", 78e9, lambda: _q3(0.9).pool),
    Row("003 part A q3 concurrency at 0.9", 58, lambda: _q3(0.9).capacity, relative=0),
    Row("003 part A q3 pool at 0.5", 14e9, lambda: _q3(0.5).pool, rounded_to=1e9),
    Row("003 part A q3 concurrency at 0.5", 10, lambda: _q3(0.5).capacity, relative=0),
    Row(
        "003 part A q3 nearly six times the concurrency",
        6,
        lambda: _q3(0.9).capacity.value / _q3(0.5).capacity.value,
        rounded_to=1,
    ),
    Row("003 part A q4 gain", 2.2, _q4_gain, rounded_to=0.1),
    Row("003 part A q4 asynchronous step", 600, lambda: 1300 / _q4_gain().value),
    Row("003 part A q6 70B state", 1.13e12, lambda: _q6(8) * 8),
    Row("003 part A q6 on 8 cards", 141e9, lambda: _q6(8)),
    Row("003 part A q6 on 16 cards", 70e9, lambda: _q6(16)),
    Row("003 part A q6 on 32 cards", 35e9, lambda: _q6(32)),
    Row("003 part A q7 235B in bf16", 470e9, lambda: _q7().bytes),
    Row("003 part A q7 bound of one 400 Gb/s card", 9.4, lambda: _q7().nccl_bound),
    Row("003 part A q7 at 10 GB/s", 47, lambda: _q7_at(10e9)),
    Row("003 part A q7 at 8 GB/s", 59, lambda: _q7_at(8e9)),
    Row("003 part A q8 k = 1", 0.17, lambda: _q8(20, 1)),
    Row("003 part A q8 k = 2", 0.09, lambda: _q8(20, 2), rounded_to=0.01),
    Row("003 part A q8 k = 5", 0.04, lambda: _q8(20, 5), rounded_to=0.01),
    Row("003 part A q8 delta, k = 1", 0.07, lambda: _q8(8, 1), rounded_to=0.01),
    Row("003 part A q9 4K", 0, lambda: _q9(80), relative=0),
    Row("003 part A q9 16K", 1, lambda: _q9(320), relative=0),
    Row("003 part A q9 32K", 3, lambda: _q9(640), relative=0),
    Row("003 part A q10 executions", 120_000, lambda: _q10().executions, relative=0),
    Row("003 part A q10 CPU hours", 1333, lambda: _q10().cpu_hours),
    Row("003 part A q10 releasable sandboxes", 2000, lambda: _q10().releasable),
    Row("003 part A q10 wall clock of an episode", 900, lambda: _q10().rollout.mean_episode),
    Row("003 part A q10 stateful sandboxes", 3000, lambda: _q10().stateful),
    Row("003 part A q10 half as many again", 1.5, lambda: _q10().stateful.value / _q10().releasable.value),
]

UNREPRODUCED = [
    Unreproduced(
        "003 part A q7 verl takes 246 to 266 s",
        "246-266 s",
        "a published measurement; the answer itself says that nearly 200 s of it is no transfer",
        measured=True,
    ),
    Unreproduced("003 part A q7 delta takes 11.4 to 14.9 s", "11.4-14.9 s", "a published measurement", measured=True),
]
