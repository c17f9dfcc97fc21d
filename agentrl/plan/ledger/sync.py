"""Bytes and seconds of moving weights: trainer to engine once a step, and the colocated hand-over of memory.

Called by the ledger and the choice. Invariant: no method is faster than one network share of a GPU per full copy it
pushes through one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given

_VERL = "verl documentation, Checkpoint Engine (weight synchronisation)"
_VLLM = "vLLM documentation, Sleep Mode"
_CHECKPOINT_ENGINE = "MoonshotAI checkpoint-engine README; PyTorch blog on RDMA weight transfer for RL"


INDEX = Input("delta_index_bytes", 4, "B", "a 32-bit position within its tensor")


def sync_bytes(parameters: Quantity, size: Quantity) -> Figure:
    """One copy of the weights in the engine's precision."""
    value = parameters.value * size.value
    return Figure("sync_bytes", value, "B", f"{parameters.name} x {size.name}", (parameters, size), _VERL)


def delta_sync_bytes(parameters: Quantity, size: Quantity, changed: Quantity) -> Figure:
    """The changed parameters alone, each with its position; no rank ever holds the whole model."""
    value = parameters.value * changed.value * (size.value + INDEX.value)
    formula = f"{parameters.name} x {changed.name} x ({size.name} + {INDEX.name})"
    return Figure("sync_bytes", value, "B", formula, (parameters, changed, size, INDEX), _VERL)


def transfer_s(name: str, size: Quantity, rate: Quantity, source: str = _VERL) -> Figure:
    """Bytes over a rate."""
    return Figure(name, size.value / rate.value, "s", f"{size.name} / {rate.name}", (size, rate), source)


def round_trip_s(name: str, size: Quantity, write: Quantity, copies: Quantity) -> Figure:
    """Written once by the trainer and read by every instance, through a store of a limited rate."""
    value = size.value * (1 + copies.value) / write.value
    formula = f"{size.name} x (1 + {copies.name}) / {write.name}"
    return Figure(name, value, "s", formula, (size, copies, write), _VERL)


def switch_bytes(parts: tuple[Quantity, ...]) -> Figure:
    """What one GPU moves out and in again each step so that trainer and engine can share it."""
    value = 2 * sum(part.value for part in parts)
    formula = f"2 x ({' + '.join(part.name for part in parts)})"
    return Figure("switch_bytes", value, "B", formula, parts, _VLLM)


class Sync:
    """How long each method takes to bring new weights from the trainer to `instances` copies."""

    def __init__(self, plan: PlanInput, instances: int) -> None:
        self.plan = plan
        self.given = Given(plan)
        self.instances = Input("instances", instances, source="[cluster] or the split")

    @cached_property
    def bytes(self) -> Figure:
        share, size = self.plan.form.changed_share, self.given.rollout("weight_bytes", "B")
        if share == 1:
            return sync_bytes(self.given.parameters, size)
        return delta_sync_bytes(self.given.parameters, size, Input("changed_share", share, "share", "[form]"))

    @cached_property
    def ipc(self) -> Figure:
        """Colocated: every GPU gathers the model parameter by parameter, then hands it over by CUDA IPC."""
        return transfer_s("sync_ipc_s", self.bytes, self.given.gather_rate, "vLLM documentation, Weight Transfer (IPC)")

    @cached_property
    def nccl_bound(self) -> Figure:
        """One rank sends the model through its own network share: no broadcast is faster."""
        return transfer_s("sync_nccl_bound_s", self.bytes, self.given.network_rate)

    @cached_property
    def nccl(self) -> Figure:
        return transfer_s("sync_nccl_s", self.bytes, self.given.assumed("broadcast_bytes_per_s", "B/s"))

    @cached_property
    def multi_source(self) -> Figure:
        """Every rank sends the shards it holds."""
        rate = self.given.assumed("multi_source_bytes_per_s", "B/s")
        return transfer_s("sync_multi_source_s", self.bytes, rate, _CHECKPOINT_ENGINE)

    @cached_property
    def disk(self) -> Figure:
        rate = self.given.assumed("checkpoint_bytes_per_s", "B/s")
        return round_trip_s("sync_disk_s", self.bytes, rate, self.instances)

    @cached_property
    def object_store(self) -> Figure:
        rate = self.given.assumed("object_store_bytes_per_s", "B/s")
        return round_trip_s("sync_object_store_s", self.bytes, rate, self.instances)

    @property
    def by_method(self) -> Mapping[str, Figure]:
        return {
            "ipc": self.ipc,
            "nccl": self.nccl,
            "multi_source": self.multi_source,
            "disk": self.disk,
            "object_store": self.object_store,
        }

    def chosen(self, *, colocated: bool) -> Figure:
        """The plan's own method, else IPC when trainer and engine share GPUs and a broadcast when they do not."""
        method = self.plan.form.sync_method or ("ipc" if colocated else "nccl")
        figure = self.by_method[method]
        return Figure("sync_s", figure.value, "s", figure.name, (figure,), figure.source)
