"""The ledger of a plan: all figures of a step when trainer and engine share every GPU, in tables.

Other forms use the same parts on other numbers of GPUs (`agentrl.plan.choice`). Invariant: a name stands for one
figure in the whole ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity, find, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger import kv
from agentrl.plan.ledger.decode import tail_at_share, tail_free_gain
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.memory import Stack, TrainerMemory, pinned_bytes, rollout_stack
from agentrl.plan.ledger.mfu import Phase, step_mfu, waterfall
from agentrl.plan.ledger.rollout import Rollout
from agentrl.plan.ledger.sandboxes import Sandboxes
from agentrl.plan.ledger.sync import Sync, switch_bytes, transfer_s
from agentrl.plan.ledger.training import Training

TAIL_SHARES = (30, 50, 70, 85)
"""Percent of generation, for which the gain of not waiting is shown beside the plan's own."""


class Ledger:
    def __init__(self, plan: PlanInput, *, colocated: bool = True) -> None:
        """`colocated` False leaves out what the trainer keeps on a GPU, where the engine only fits without."""
        self.plan = plan
        self.given = Given(plan)
        gpus = plan.cluster.gpus
        self.rollout = Rollout(plan, gpus, colocated=colocated)
        self.training = Training(plan, gpus)
        self.trainer_memory = TrainerMemory(plan, gpus)
        self.sandboxes = Sandboxes(plan, self.rollout)
        self.sync = Sync(plan, int(self.rollout.instances.value))
        self.flops = self.training.flops
        self.gpus = self.given.gpus("gpus", gpus)

    @cached_property
    def switch(self) -> Figure:
        """The trainer's state of a GPU goes out to host memory before the rollout and comes back after it."""
        moved = switch_bytes(self.trainer_memory.state)
        return transfer_s("switch_s", moved, self.given.assumed("host_copy_bytes_per_s", "B/s"))

    @cached_property
    def communication(self) -> tuple[Figure, ...]:
        """Bytes of a GPU, and seconds by phase; in the step's time only with `assume.count_communication`."""
        ranks, training = self.rollout.communication, self.training.communication
        sent = (training.tensor_bytes, *training.shards, *([training.expert_bytes] if training.expert_bytes else []))
        return (ranks.decode_step, ranks.decode, ranks.prefill, ranks.exposed, *sent, *training.parts,
                training.exposed, self.training.bubble)  # fmt: skip

    @cached_property
    def pinned(self) -> Figure:
        """Host memory of a node for what its GPUs move out while they generate."""
        node = min(self.plan.cluster.gpus_per_node, self.plan.cluster.gpus)
        return pinned_bytes(Input("node_gpus", node, source="[cluster]"), self.trainer_memory.state)

    @cached_property
    def gain_by_tail(self) -> tuple[Figure, ...]:
        """What a step without its tail would gain if the tail were this share of generation."""
        found = []
        for percent in TAIL_SHARES:
            share = Input(f"tail_share_of_{percent}", percent / 100, "share", "for comparison")
            tail = tail_at_share(self.rollout.throughput, share)
            generation = total(f"generation_with_{percent}_s", "s", (self.rollout.throughput, tail))
            gain = tail_free_gain(share, generation, self.training.total)
            found.append(replace(gain, name=f"tail_free_gain_at_{percent}"))
        return tuple(found)

    @cached_property
    def step(self) -> Figure:
        parts = (
            self.rollout.generation,
            self.training.forward,
            self.training.update,
            *self.training.exposed,
            self.switch,
        )
        return total("step_s", "s", (*parts, self.sync.chosen(colocated=True)))

    @cached_property
    def mfu(self) -> Figure:
        return step_mfu(self.flops.step, self.gpus, self.given.peak_flops, self.step)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The step in its order, each phase on all GPUs."""
        rollout, training, gpus = self.rollout, self.training, self.gpus
        prefill = rollout.prefill.seconds
        decoding = Figure(
            "decode_s", rollout.throughput.value - prefill.value, "s", f"throughput_s - {prefill.name}",
            (rollout.throughput, prefill),
        )  # fmt: skip
        return (
            Phase("prefill", prefill, gpus, self.flops.prefill),
            Phase("decode", decoding, gpus, self.flops.decode),
            Phase("tail", rollout.tail, gpus),
            Phase("forward", training.forward, gpus, self.flops.forward),
            Phase("train", training.update, gpus, self.flops.train),
            *(Phase(part.name.removesuffix("_s"), part, gpus) for part in training.exposed),
            Phase("switch", self.switch, gpus),
            Phase("sync", self.sync.chosen(colocated=True), gpus),
        )

    @cached_property
    def waterfall(self) -> tuple[Figure, ...]:
        return waterfall(self.phases, self.gpus, self.given.peak_flops, self.step)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Memory of a GPU while it decodes and while it trains."""
        return rollout_stack(self.rollout), self.trainer_memory.stack

    @cached_property
    def cost(self) -> tuple[Figure, ...]:
        price = Input("gpu_usd_per_hour", self.plan.gpu_usd_per_hour, "$/h", "[cluster] or the table's example price")
        value = self.gpus.value * price.value * self.step.value / 3600
        gpu = Figure("gpu_usd", value, "$", "gpus x gpu_usd_per_hour x step_s / 3600", (self.gpus, price, self.step))
        if self.plan.workload.environment_s.mean == 0:
            return (gpu, total("step_usd", "$", (gpu,)))
        host = Input("cpu_host_usd_per_hour", self.plan.cpu_host_usd_per_hour, "$/h", self.plan.cpu_host.source)
        hosts = self.sandboxes.hosts
        value = hosts.value * host.value * self.step.value / 3600
        formula = "cpu_hosts x cpu_host_usd_per_hour x step_s / 3600"
        cpu = Figure("cpu_usd", value, "$", formula, (hosts, host, self.step))
        return (gpu, cpu, total("step_usd", "$", (gpu, cpu)))

    @cached_property
    def sections(self) -> Mapping[str, tuple[Figure, ...]]:
        """Tables by title, in the order in which people read them."""
        rollout, training, memory, flops = self.rollout, self.training, self.trainer_memory, self.flops
        tokens, gain = rollout.tokens, tail_free_gain(rollout.tail_share, rollout.generation, training.total)
        held = kv.kv_of_memory(rollout.kv_step, self.gpus, self.given.memory_bytes)
        sandbox = self.sandboxes
        tables: dict[str, tuple[Figure, ...]] = {
            "Tokens": (tokens.sampled, tokens.all, tokens.environment_share, tokens.prefill_new, tokens.prefill_cold),
            "FLOPs": (flops.prefill, flops.decode, flops.forward, flops.train, flops.step, flops.recompute,
                      flops.attention_share),
            "KV": (rollout.kv_per_token, rollout.kv_step, held, rollout.pool, rollout.capacity, rollout.waves),
            "Rollout": (rollout.full_memory_step, rollout.decoding, rollout.decode_step, rollout.tail_step,
                        rollout.instance_rate, rollout.prefill.residency, rollout.prefill.warm, rollout.prefill.cold,
                        rollout.prefill.seconds, rollout.throughput, rollout.tail, rollout.tail_share,
                        rollout.generation),
            "Training": (training.forward, training.update, memory.whole_state),
            "Communication of ranks": self.communication,
            "Weight sync": (self.sync.bytes, *self.sync.by_method.values(), self.sync.nccl_bound, self.switch,
                            self.pinned),
            "Step": (self.step, self.mfu, gain, *self.gain_by_tail),
            "MFU waterfall": self.waterfall,
        }  # fmt: skip
        for stack in self.stacks:
            tables[f"Memory of a GPU, {stack.phase}"] = (*stack.parts, stack.used, stack.free)
        if self.plan.workload.environment_s.mean:
            tables["Sandboxes"] = (
                sandbox.executions, sandbox.cpu_hours, sandbox.reward_hours, rollout.in_flight, rollout.mean_episode,
                sandbox.releasable, sandbox.stateful, sandbox.hosts,
            )  # fmt: skip
        tables["Cost"] = self.cost
        return tables

    def figures(self) -> Iterator[Figure]:
        for table in self.sections.values():
            yield from table

    def find(self, name: str) -> Quantity:
        """A figure of the ledger, or anything it rests on. ConfigError names the nearest one."""
        return find(self.figures(), name)


def build_ledger(plan: PlanInput) -> Ledger:
    """The ledger of a checked plan. ConfigError when no GPU of it can hold the engine or the trainer."""
    ledger = Ledger(plan)
    _ = ledger.rollout.pool
    ledger.trainer_memory.check()
    return ledger
