"""The plan's settings, data-sheet entries and model sizes as named `Input`s: the leaves of every derivation.

Read by the other modules of the ledger. Invariant: a value of the plan has one name here, whatever figure uses it.
"""

from __future__ import annotations

from agentrl.plan.figure import Input
from agentrl.plan.inputs import PlanInput


class Given:
    def __init__(self, plan: PlanInput) -> None:
        self.plan = plan
        self._shape, self._gpu, self._work = plan.shape.source, plan.gpu.source, "[workload]"

    @property
    def parameters(self) -> Input:
        return Input("parameters", self.plan.shape.parameters, source=self._shape)

    @property
    def active_parameters(self) -> Input:
        return Input("active_parameters", self.plan.shape.active_parameters, source=self._shape)

    @property
    def layers(self) -> Input:
        return Input("layers", self.plan.shape.layers, source=self._shape)

    @property
    def stage_layers(self) -> Input:
        """Of one rank of the trainer's pipeline."""
        stages = self.plan.trainer.pipeline_parallel
        return Input("stage_layers", self.plan.shape.layers / stages, source="layers / [trainer] pipeline_parallel")

    @property
    def stage_sparse_layers(self) -> Input:
        layers, source = self.plan.shape.sparse_layers, "sparse_layers / [trainer] pipeline_parallel"
        return Input("stage_sparse_layers", layers / self.plan.trainer.pipeline_parallel, source=source)

    @property
    def sparse_layers(self) -> Input:
        return Input("sparse_layers", self.plan.shape.sparse_layers, source=self._shape)

    @property
    def experts_per_token(self) -> Input:
        return Input("experts_per_token", self.plan.shape.experts_per_token, source=self._shape)

    def expert_ranks(self, gpus: float) -> Input:
        """Over which a layer's experts are spread: at most one rank an expert."""
        return Input("expert_ranks", min(gpus, self.plan.shape.experts), source="trainer GPUs, experts")

    @property
    def hidden(self) -> Input:
        return Input("hidden", self.plan.shape.hidden, source=self._shape)

    @property
    def vocabulary(self) -> Input:
        return Input("vocabulary", self.plan.shape.vocabulary, source=self._shape)

    @property
    def kv_values(self) -> Input:
        return Input("kv_values_per_layer", self.plan.shape.attention.kv_values, source=self._shape)

    @property
    def pair_flops(self) -> Input:
        return Input("attention_pair_flops", self.plan.shape.attention.pair_flops, "FLOP", self._shape)

    @property
    def prompts(self) -> Input:
        return Input("prompts", self.plan.workload.prompts, source=self._work)

    @property
    def episodes(self) -> Input:
        return Input("episodes", self.plan.workload.episodes, source="[workload] prompts x samples")

    @property
    def turns(self) -> Input:
        return Input("turns", self.plan.workload.turns, source=self._work)

    @property
    def prompt_tokens(self) -> Input:
        return Input("prompt_tokens", self.plan.workload.prompt_tokens.mean, "tokens", self._work)

    @property
    def turn_tokens(self) -> Input:
        return Input("turn_sampled_tokens", self.plan.workload.response_tokens.mean, "tokens", self._work)

    @property
    def tool_tokens(self) -> Input:
        return Input("turn_tool_tokens", self.plan.workload.tool_tokens.mean, "tokens", self._work)

    @property
    def environment_s(self) -> Input:
        return Input("turn_environment_s", self.plan.workload.environment_s.mean, "s", self._work)

    def measured_turn_s(self) -> Input:
        """Of a plan that has it."""
        return Input("turn_generation_s", self.plan.workload.turn_generation_s or 0.0, "s", self._work)

    @property
    def environment_cores(self) -> Input:
        return Input("environment_cores", self.plan.workload.environment_cores, "cores", self._work)

    @property
    def peak_flops(self) -> Input:
        return Input("peak_flops_per_s", self.plan.gpu.flops, "FLOP/s", self._gpu)

    @property
    def memory_bytes(self) -> Input:
        return Input("gpu_memory_bytes", self.plan.gpu.memory_bytes, "B", self._gpu)

    @property
    def memory_rate(self) -> Input:
        return Input("memory_bytes_per_s", self.plan.gpu.memory_bytes_per_s, "B/s", self._gpu)

    @property
    def network_rate(self) -> Input:
        return Input("network_bytes_per_s", self.plan.gpu.network_bytes_per_s, "B/s", self._gpu)

    @property
    def gather_rate(self) -> Input:
        """At which a GPU gathers what the others hold: within a node over its own links."""
        if self.plan.cluster.gpus <= self.plan.cluster.gpus_per_node:
            return self.peer_rate
        return self.network_rate

    @property
    def peer_rate(self) -> Input:
        return Input("peer_bytes_per_s", self.plan.gpu.peer_bytes_per_s, "B/s", self._gpu)

    @property
    def instance_gpus(self) -> Input:
        return Input("gpus_per_instance", self.plan.rollout.gpus_per_instance, source="[rollout]")

    def gpus(self, name: str, count: float) -> Input:
        return Input(name, count, source="[cluster] or the split")

    def rollout(self, name: str, unit: str = "") -> Input:
        """A setting of [rollout]."""
        return Input(f"rollout_{name}", float(getattr(self.plan.rollout, name)), unit, "[rollout]")

    def trainer(self, name: str, unit: str = "") -> Input:
        return Input(f"trainer_{name}", float(getattr(self.plan.trainer, name)), unit, "[trainer]")

    def assumed(self, name: str, unit: str = "share") -> Input:
        """A setting of [assume]."""
        return Input(name, float(getattr(self.plan.assume, name)), unit, "[assume]")
