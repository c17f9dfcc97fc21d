"""The plan file: one TOML tree with the model, the work, the machines and the form. Read by the CLI.

Invariant: a `PlanInput` that exists names a known GPU and model and holds no impossible size; unknown keys are refused
with the nearest key named.
"""

from __future__ import annotations

import difflib
import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from agentrl.core.config import parse_section, read_toml
from agentrl.core.errors import ConfigError
from agentrl.plan.hardware import CpuHost, Gpu, cpu_host_named, gpu_named
from agentrl.plan.model import Model, model_named, read_model
from agentrl.plan.workload import Settings, Workload

FormName = Literal["colocated", "colocated_async", "separate_sync", "one_step", "async"]


class ModelSection(Settings):
    name: str = ""
    """One of the known models."""
    path: str = ""
    """A config.json or the folder of one; replaces `name`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.name) == bool(self.path):
            raise ValueError("give either a name or a path")
        return self

    def read(self) -> Model:
        return read_model(Path(self.path)) if self.path else model_named(self.name)


class ClusterSection(Settings):
    gpu: str
    """Name in the table of GPUs."""
    gpus: int = Field(gt=0)
    gpus_per_node: int = Field(8, gt=0)
    gpu_usd_per_hour: float | None = Field(None, ge=0)
    """Replaces the table's price."""
    cpu_host: str = "cpu-80"
    cpu_host_usd_per_hour: float | None = Field(None, ge=0)


class RolloutSection(Settings):
    gpus_per_instance: int = Field(1, gt=0)
    """GPUs that hold one copy of the weights: tensor x expert x pipeline parallel ranks."""
    weight_bytes: float = Field(2.0, gt=0)
    """Bytes a parameter in the engine: 2 for bf16, 1 for fp8."""
    kv_bytes: float = Field(2.0, gt=0)
    """Bytes a cached number."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and KV (vLLM's gpu_memory_utilization)."""
    resident_bytes: float = Field(0.0, ge=0)
    """Bytes of a GPU that the trainer keeps while the engine has it (colocated): graphs, buffers, what isn't moved."""
    max_sequences: int | None = Field(None, gt=0)
    """Most sequences that an instance decodes at once (vLLM's max_num_seqs); by default only memory limits."""
    in_flight: Literal["batch", "window"] | PositiveInt = "batch"
    """Episodes admitted at once, over all instances (`rollout.concurrency` of a run): all of a step, the fewest with
    which the engines are as fast as they get, or a number. It matters where episodes have an environment."""
    kv_offload: bool = False
    """KV of waiting turns is kept in host memory, so that each turn prefills only its new tokens."""

    @field_validator("in_flight", mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if given in ("batch", "window") or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
            return given
        near = difflib.get_close_matches(str(given), ("batch", "window"), n=1, cutoff=0.4)
        number = isinstance(given, int | float) and math.isfinite(given)
        nearest = repr(near[0]) if near else max(1, round(given)) if number else "'batch'"
        raise ValueError(f"{given!r} is neither 'batch' nor 'window' nor a number from 1; nearest is {nearest}")


class TrainerSection(Settings):
    recompute_logprobs: bool = True
    """A forward pass for the proximal logprobs before the update."""
    reference: bool = True
    """A forward pass of a frozen reference model."""
    critic: bool = False
    """A value model of the policy's size: one more forward pass and one more update (PPO)."""
    weight_bytes: float = Field(2.0, gt=0)
    gradient_bytes: float = Field(2.0, ge=0)
    optimizer_bytes: float = Field(12.0, ge=0)
    """fp32 master weights and both Adam moments."""
    micro_batch_tokens: int = Field(16384, gt=0)
    """Tokens of a model replica whose activations live at once."""
    model_parallel: int = Field(1, gt=0)
    """GPUs that share the activations of one micro-batch: tensor x context parallel ranks."""
    pipeline_parallel: int = Field(1, gt=0)
    """Stages of a model replica, each with its layers."""
    recompute_activations: bool = True
    """Keep only the inputs of layers and pay another forward pass."""
    memory_share: float = Field(0.9, gt=0, le=1)
    updates: int = Field(1, gt=0)
    """Optimizer updates a step (mini-batches)."""


class FormSection(Settings):
    kind: Literal["auto", FormName] = "auto"
    rollout_gpus: int | None = Field(None, gt=0)
    """Of a separate form; by default the split by time."""
    sync_every: int = Field(1, gt=0)
    """k: updates between two weight syncs."""
    max_lag: int = Field(2, ge=0)
    at_limit: Literal["wait", "drop", "partial"] = "wait"
    sync_method: Literal["ipc", "nccl", "multi_source", "disk", "object_store"] | None = None
    """By default `ipc` when colocated, else `nccl`."""
    changed_share: float = Field(1.0, gt=0, le=1)
    """Share of the parameters that a sync sends (delta sync sends only changed ones)."""


class Assumptions(Settings):
    """Shares of the data-sheet rates that are reached in practice, and rates that no data sheet gives."""

    memory_efficiency: float = Field(0.6, gt=0, le=1)
    """Of memory bandwidth while decoding."""
    forward_mfu: float = Field(0.5, gt=0, le=1)
    train_mfu: float = Field(0.4, gt=0, le=1)
    prefill_mfu: float = Field(0.5, gt=0, le=1)
    host_copy_bytes_per_s: float = Field(25e9, gt=0)
    """Between one GPU and pinned host memory."""
    broadcast_bytes_per_s: float = Field(9e9, gt=0)
    """Reached by a broadcast from one rank, gathering included."""
    multi_source_bytes_per_s: float = Field(50e9, gt=0)
    """One copy of the weights, when many ranks send their shards at once."""
    checkpoint_bytes_per_s: float = Field(10e9, gt=0)
    """The whole cluster's write rate to its file system."""
    object_store_bytes_per_s: float = Field(5e9, gt=0)
    collective_latency_s: float = Field(10e-6, ge=0)
    """Of an all-reduce or all-to-all of nothing."""
    communication_overlap: float = Field(0.0, ge=0, le=1)
    """Share of the ranks' communication that hides under compute."""
    count_communication: bool = False
    """Add the rest of it, and the pipeline's bubble, to times. Off: measured efficiencies have it inside."""
    count_attention: bool = False
    """Count the FLOPs of attention in times and MFU. Off: by parameters alone, as MFU figures usually are."""


class RunSection(Settings):
    steps: int = Field(1000, gt=0)
    gpu_mtbf_hours: float = Field(50_000.0, gt=0)
    """Mean time between failures of one GPU."""
    restart_s: float = Field(600.0, ge=0)
    """From a failure to the first step after it."""


class PlanInput(Settings):
    name: str = "plan"
    """By default the file's."""
    model: ModelSection
    workload: Workload
    cluster: ClusterSection
    rollout: RolloutSection = RolloutSection()
    trainer: TrainerSection = TrainerSection()
    form: FormSection = FormSection()
    assume: Assumptions = Assumptions()
    run: RunSection = RunSection()

    @cached_property
    def shape(self) -> Model:
        return self.model.read()

    @cached_property
    def gpu(self) -> Gpu:
        return gpu_named(self.cluster.gpu)

    @cached_property
    def cpu_host(self) -> CpuHost:
        return cpu_host_named(self.cluster.cpu_host)

    @property
    def gpu_usd_per_hour(self) -> float:
        given = self.cluster.gpu_usd_per_hour
        return self.gpu.usd_per_hour if given is None else given

    @property
    def cpu_host_usd_per_hour(self) -> float:
        given = self.cluster.cpu_host_usd_per_hour
        return self.cpu_host.usd_per_hour if given is None else given


def load(path: Path) -> PlanInput:
    """Read and check a plan file. ConfigError names each wrong key and the nearest valid choice."""
    plan = parse_section(PlanInput, {"name": path.stem, **read_toml(path)}, str(path))
    try:
        check(plan)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    return plan


def check(plan: PlanInput) -> None:
    """Names of GPU, host and model are known, and the parts of the plan fit each other. Raises ConfigError."""
    _ = plan.shape, plan.gpu, plan.cpu_host
    instance, gpus = plan.rollout.gpus_per_instance, plan.form.rollout_gpus or plan.cluster.gpus
    if instance > gpus:
        raise ConfigError(
            f"rollout.gpus_per_instance: {instance} exceeds the {gpus} GPUs of the rollout; at most {gpus}"
        )
    trainer = plan.trainer
    ranks = trainer.model_parallel * trainer.pipeline_parallel
    if ranks > plan.cluster.gpus:
        field = "model_parallel" if trainer.model_parallel > plan.cluster.gpus else "pipeline_parallel"
        most = plan.cluster.gpus // (1 if field == "model_parallel" else trainer.model_parallel)
        raise ConfigError(
            f"trainer.{field}: a replica of {ranks} GPUs exceeds the cluster's {plan.cluster.gpus}; at most {most}"
        )
    if trainer.pipeline_parallel > plan.shape.layers:
        raise ConfigError(
            f"trainer.pipeline_parallel: {trainer.pipeline_parallel} stages of {plan.shape.layers} layers; at most "
            f"{plan.shape.layers}"
        )
    admitted, episodes = plan.rollout.in_flight, plan.workload.episodes
    if isinstance(admitted, int) and admitted > episodes:
        raise ConfigError(
            f"rollout.in_flight: {admitted} exceeds the {episodes} episodes of a step; at most {episodes}"
        )
    split = plan.form.rollout_gpus
    if split is not None and split >= plan.cluster.gpus:
        raise ConfigError(
            f"form.rollout_gpus: {split} leaves no GPU of {plan.cluster.gpus} to the trainer; "
            f"at most {plan.cluster.gpus - 1}"
        )
