"""003, chapter 2 sections 3 to 5 and 8: colocation, weight sync, staleness and checkpoints."""

from __future__ import annotations

from functools import cache

from seed_plans import plan, plan_8b, plan_32b, plan_v3
from seed_rows import Row, Unreproduced

from agentrl.plan.choice.checkpoints import checkpoint_write_s
from agentrl.plan.choice.correction import continuation_flops, running_sequences
from agentrl.plan.choice.staleness import typical_lag
from agentrl.plan.choice.synchronization import sync_bubble, sync_share
from agentrl.plan.figure import Figure, Input, share_of
from agentrl.plan.ledger import Ledger, Rollout, Sync, TrainerMemory
from agentrl.plan.ledger.memory import pinned_bytes
from agentrl.plan.ledger.sync import switch_bytes, transfer_s

NODE = Input("gpus_per_node", 8)
PINNED_RATE = Input("host_copy_bytes_per_s", 25e9, "B/s")


@cache
def _trainer(model: str, gpus: int) -> TrainerMemory:
    return TrainerMemory(plan(model, gpus), gpus)


def _part(name: str) -> Figure:
    """Of the 32B's state on each of 8 cards."""
    return next(part for part in _trainer("Qwen2.5-32B", 8).state if part.name == name)


def _moved_32b() -> tuple[Figure, ...]:
    """Gradients are rebuilt, not moved."""
    return _part("optimizer_gpu_bytes"), _part("trainer_weights_gpu_bytes"), _part("reference_gpu_bytes")


def _state(model: str, gpus: int) -> float:
    return sum(part.value for part in _trainer(model, gpus).state)


def _switch(model: str, gpus: int) -> Figure:
    return transfer_s("switch_s", switch_bytes(_trainer(model, gpus).state), PINNED_RATE)


def _generation_at(memory_share: float) -> Figure:
    """Of the 8B, when the trainer's sharded state stays on the card; without it the page's four times do not fit."""
    setting = {"memory_share": memory_share, "resident_bytes": _state("Llama-3-8B", 64)}
    return Rollout(plan("Llama-3-8B", 64, rollout=setting), 64).generation


@cache
def _sync(model: str, weight_bytes: float) -> Sync:
    return Sync(plan(model, 256, rollout={"gpus_per_instance": 32, "weight_bytes": weight_bytes}), 8)


def _bubble(sync_s: float) -> Figure:
    return sync_bubble(Input("sync_s", sync_s, "s"), Input("updates", 1), Input("update_s", 60, "s"))


def _lag(tokens: float) -> Figure:
    """At the 20 ms a token of part A question 9, and 150 s between syncs."""
    seconds = Input("generation_s", tokens * 0.02, "s")
    return typical_lag(seconds, Input("wait_s", 0, "s"), Input("interval_s", 150, "s"))


def _running() -> Figure:
    rollout = Rollout(plan_8b(), 64)
    return running_sequences(rollout.instances, rollout.capacity)


def _again() -> Figure:
    half = Input("generated_tokens", 4096, "tokens")
    return continuation_flops(_running(), half, Ledger(plan_8b()).given.active_parameters)


def _checkpoint_s(model: str) -> Figure:
    return checkpoint_write_s(_trainer(model, 256).whole_state, Input("storage_bytes_per_s", 10e9, "B/s"))


ROWS = [
    Row(
        "003 3.2 sharded state of the 8B on 64 cards 2 GB",
        2e9,
        lambda: _trainer("Llama-3-8B", 64).whole_state.value / 64,
    ),
    Row("003 2.3 optimizer and master weights of the 32B 49 GB", 49e9, lambda: _part("optimizer_gpu_bytes")),
    Row("003 2.3 bf16 shard of the 32B 8 GB", 8e9, lambda: _part("trainer_weights_gpu_bytes"), rounded_to=1e9),
    Row("003 2.3 reference of the 32B 8 GB", 8e9, lambda: _part("reference_gpu_bytes"), rounded_to=1e9),
    Row("003 2.3 the 32B moves 130 GB a step", 130e9, lambda: switch_bytes(_moved_32b())),
    Row(
        "003 2.3 optimizer there and back 4 s",
        4,
        lambda: transfer_s("optimizer_s", switch_bytes(_moved_32b()[:1]), PINNED_RATE),
    ),
    Row(
        "003 2.3 moving is 2 % of five minutes",
        0.02,
        lambda: sync_share(transfer_s("switch_s", switch_bytes(_moved_32b()), PINNED_RATE), Input("step_s", 300, "s")),
        rounded_to=0.01,
    ),
    Row("003 2.3 state of the 8B on 64 cards 2.3 GB", 2.3e9, lambda: _state("Llama-3-8B", 64)),
    Row("003 2.3 moving the 8B 0.2 s", 0.2, lambda: _switch("Llama-3-8B", 64), rounded_to=0.1),
    Row("003 2.3 state of DeepSeek-V3 on 256 cards 47 GB", 47e9, lambda: _state("DeepSeek-V3", 256)),
    Row("003 2.3 moving DeepSeek-V3 3.8 s", 3.8, lambda: _switch("DeepSeek-V3", 256)),
    Row("003 2.3 generation at memory share 1.0", 602, lambda: _generation_at(1.0)),
    Row("003 2.3 generation at memory share 0.85", 610, lambda: _generation_at(0.85)),
    Row("003 2.3 generation at memory share 0.7", 645, lambda: _generation_at(0.7)),
    Row("003 2.3 generation at memory share 0.5", 745, lambda: _generation_at(0.5)),
    Row(
        "003 part C q3 0.5 instead of 0.85 costs 22 %",
        1.22,
        lambda: _generation_at(0.5).value / _generation_at(0.85).value,
    ),
    Row("003 2.3 pinned memory of the 32B on 8 cards 520 GB", 520e9, lambda: pinned_bytes(NODE, _moved_32b())),
    Row("003 2.3 70B state 1.1 TB", 1.1e12, lambda: _trainer("Llama-3-70B", 8).whole_state, rounded_to=0.1e12),
    Row("003 2.3 colocated sync of the 8B 0.3 s", 0.3, lambda: Ledger(plan_8b()).sync.ipc, rounded_to=0.1),
    Row("003 2.3 colocated sync of the 32B 1 s", 1, lambda: Ledger(plan_32b()).sync.ipc, rounded_to=1),
    Row("003 2.4 671B in FP8 671 GB", 671e9, lambda: _sync("DeepSeek-V3", 1).bytes),
    Row("003 2.4 671B in bf16 1.34 TB", 1.34e12, lambda: _sync("DeepSeek-V3", 2).bytes),
    Row("003 2.4 671B through one card 13 s", 13, lambda: _sync("DeepSeek-V3", 1).nccl_bound, rounded_to=1),
    Row("003 2.4 Qwen3-30B-A3B 61 GB", 61e9, lambda: _sync("Qwen3-30B-A3B", 2).bytes),
    Row(
        "003 2.4 Qwen3-30B-A3B at 8 to 9 GB/s 7 s",
        7,
        lambda: transfer_s("sync_nccl_s", _sync("Qwen3-30B-A3B", 2).bytes, Input("rate", 8.7e9, "B/s")),
    ),
    Row(
        "003 2.4 80 s of a 650 s step 12 %",
        0.12,
        lambda: sync_share(Input("sync_s", 80, "s"), Input("step_s", 650, "s")),
        rounded_to=0.01,
    ),
    Row("003 2.4 bubble of a full sync 20 %", 0.20, lambda: _bubble(15)),
    Row("003 2.4 bubble of a delta sync 9 %", 0.09, lambda: _bubble(6), rounded_to=0.01),
    Row("003 part B q2 32B in bf16 66 GB", 66e9, lambda: _sync("Qwen2.5-32B", 2).bytes),
    Row("003 part B q3 671B on 32 cards an instance", 32, lambda: plan_v3().rollout.gpus_per_instance, relative=0),
    Row("003 part B q3 training state of the 671B 10.7 TB", 10.7e12, lambda: _trainer("DeepSeek-V3", 256).whole_state),
    Row("003 2.5 lag of 2K", 0, lambda: _lag(2048), relative=0),
    Row("003 2.5 lag of 8K", 1, lambda: _lag(8192), relative=0),
    Row("003 2.5 lag of 32K", 4, lambda: _lag(32768), relative=0),
    Row("003 2.5 running sequences 6000", 6000, _running),
    Row("003 2.5 prefilling them again 0.4 EFLOP", 0.4e18, _again, rounded_to=0.1e18),
    Row(
        "003 2.5 prefilling them again 6 % of the step",
        0.06,
        lambda: share_of("continuation_share", _again(), Ledger(plan_8b()).flops.step),
        rounded_to=0.01,
    ),
    Row("003 2.8 checkpoint of the 8B 128 GB", 128e9, lambda: _trainer("Llama-3-8B", 256).whole_state),
    Row("003 2.8 checkpoint of the 8B 13 s", 13, lambda: _checkpoint_s("Llama-3-8B")),
    Row("003 2.8 checkpoint of the 32B 525 GB", 525e9, lambda: _trainer("Qwen2.5-32B", 256).whole_state),
    Row("003 2.8 checkpoint of the 32B 53 s", 53, lambda: _checkpoint_s("Qwen2.5-32B")),
    Row("003 2.8 checkpoint of the 671B 10.7 TB", 10.7e12, lambda: _trainer("DeepSeek-V3", 256).whole_state),
    Row("003 2.8 checkpoint of the 671B 18 min", 18 * 60, lambda: _checkpoint_s("DeepSeek-V3")),
]

UNREPRODUCED = [
    Unreproduced(
        "003 2.3 the 32B's hand-over 6.5 s",
        "6.5 s",
        "the printed 130 GB at the printed 25 GB/s are 5.2 s; the page does not say what the other 1.3 s are",
    ),
    Unreproduced(
        "003 2.3 both sides of the 32B on 8 cards 120 GB or more",
        "> 120 GB",
        "a bound that depends on the size of the KV pool, which the page leaves open there",
    ),
    Unreproduced(
        "003 2.4 671B through rank 0 60 to 80 s",
        "60-80 s",
        "671 GB at the 8 to 10 GB/s that the same line gives are 67 to 84 s",
    ),
    Unreproduced(
        "003 2.4 671B from many sources 12 to 20 s",
        "12-20 s",
        "a range of reports; the ledger's own rate for many sources (an assumption) gives 13 s",
        measured=True,
    ),
    Unreproduced(
        "003 2.4 full and delta sync of 7B to 235B",
        "3.9-4.9 / 5.5-6.0 s ... 11.4-14.9 / 246-266 s",
        "published measurements of verl, and the 21x and 1.3x that follow from them",
        measured=True,
    ),
    Unreproduced(
        "003 2.4 changed parameters a step", "dense 1-3 %, MoE 0.02-0.05 %", "published measurements", measured=True
    ),
    Unreproduced(
        "003 part B q2 32B across machines 8 to 18 s, delta 6 to 12 s",
        "8-18 s, 6-12 s",
        "published measurements",
        measured=True,
    ),
    Unreproduced(
        "003 2.2 verl 2.66x, 1.92x, 2.35x; 790 s to 356 s", "2.35-2.67x", "published measurements", measured=True
    ),
    Unreproduced(
        "003 2.5 AReaL 2.77x; verl 25.9, 20.0, 17.3, 17.4 h", "2.77x", "published measurements", measured=True
    ),
    Unreproduced(
        "003 2.5 mismatch of logprobs", "1e-3, FP8 1e-2, MoE above 1", "published measurements", measured=True
    ),
    Unreproduced(
        "003 2.4 a model of 1T on a thousand cards 20 s",
        "20 s",
        "a published measurement (checkpoint-engine)",
        measured=True,
    ),
    Unreproduced(
        "003 2.4 and 2.5 settings: buckets of 512 MB, two at most; off-policy threshold 8; weights cut at 2",
        "512 MB, 8, 2",
        "defaults of frameworks, given and not computed",
    ),
]
