"""What parallel ranks send each other in a step: bytes of one GPU and seconds over their links, by phase.

Called by `training` and `rollout`, which add it to their times only with `assume.count_communication`: measured
efficiencies, as the defaults of [assume] are, have it inside. A group within one node uses its own links, a larger one
the network. Invariant: a group of one sends nothing.
"""

from __future__ import annotations

import math
from functools import cached_property

from agentrl.plan.figure import Figure, Input, Quantity, total
from agentrl.plan.inputs import PlanInput
from agentrl.plan.ledger.given import Given
from agentrl.plan.ledger.tokens import Tokens

_MEGATRON = "Shoeybi et al. 2019, Megatron-LM, section 3: two all-reduces a layer and pass"
_RING = "Thakur et al. 2005, Optimization of Collective Communication Operations in MPICH"
_ZERO = "Rajbhandari et al. 2020, ZeRO, section 7"
_EXPERTS = "Lepikhin et al. 2020, GShard, section 3: tokens go to their experts and back"
_PIPELINE = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, section 2.2"
ACTIVATION_BYTES = Input("activation_bytes", 2, "B", "bf16")


def all_reduce_bytes(name: str, tokens: Quantity, hidden: Quantity, layers: Quantity, passes: Quantity,
                     ranks: Quantity) -> Figure:  # fmt: skip
    """Tensor parallel: 2 all-reduces of tokens x hidden a layer and pass; a ring sends 2 (n - 1) / n of each."""
    ring = 2 * (ranks.value - 1) / ranks.value
    value = 2 * layers.value * passes.value * tokens.value * hidden.value * ACTIVATION_BYTES.value * ring
    formula = (
        f"2 x {layers.name} x {passes.name} x {tokens.name} x {hidden.name} x {ACTIVATION_BYTES.name} "
        f"x 2 ({ranks.name} - 1) / {ranks.name}"
    )
    return Figure(name, value, "B", formula, (layers, passes, tokens, hidden, ACTIVATION_BYTES, ranks), _MEGATRON)


def all_to_all_bytes(name: str, tokens: Quantity, hidden: Quantity, layers: Quantity, used: Quantity,
                     passes: Quantity, ranks: Quantity) -> Figure:  # fmt: skip
    """Expert parallel: each token goes to its experts and back in every layer that has some."""
    away = (ranks.value - 1) / ranks.value
    value = 2 * layers.value * passes.value * tokens.value * used.value * hidden.value * ACTIVATION_BYTES.value * away
    formula = (
        f"2 x {layers.name} x {passes.name} x {tokens.name} x {used.name} x {hidden.name} x {ACTIVATION_BYTES.name} "
        f"x ({ranks.name} - 1) / {ranks.name}"
    )
    inputs = (layers, passes, tokens, used, hidden, ACTIVATION_BYTES, ranks)
    return Figure(name, value, "B", formula, inputs, _EXPERTS)


def shard_bytes(
    name: str, parameters: Quantity, size: Quantity, times: Quantity, tensor: Quantity, ranks: Quantity
) -> Figure:
    """Fully sharded state: an all-gather or a reduce-scatter of a rank's part of the model, so many times."""
    value = parameters.value * size.value * times.value / tensor.value * (ranks.value - 1) / ranks.value
    formula = f"{parameters.name} x {size.name} x {times.name} / {tensor.name} x ({ranks.name} - 1) / {ranks.name}"
    return Figure(name, value, "B", formula, (parameters, size, times, tensor, ranks), _ZERO)


def bubble_share(stages: Quantity, micro_batches: Quantity) -> Figure:
    """Of a pipeline's compute, that its stages wait while it fills and drains."""
    value = (stages.value - 1) / micro_batches.value
    formula = f"({stages.name} - 1) / {micro_batches.name}"
    return Figure("pipeline_bubble_share", value, "share", formula, (stages, micro_batches), _PIPELINE)


class Links:
    """How long bytes take within a group of ranks."""

    def __init__(self, plan: PlanInput) -> None:
        self.plan = plan
        self.given = Given(plan)

    def rate(self, ranks: float) -> Input:
        return self.given.peer_rate if ranks <= self.plan.cluster.gpus_per_node else self.given.network_rate

    def seconds(self, size: Figure, ranks: float, rounds: Quantity | None = None) -> Figure:
        rate, name = self.rate(ranks), f"{size.name.removesuffix('_bytes')}_s"
        if rounds is None or ranks == 1:
            return Figure(name, size.value / rate.value, "s", f"{size.name} / {rate.name}", (size, rate), _RING)
        latency = self.given.assumed("collective_latency_s", "s")
        value = size.value / rate.value + rounds.value * latency.value
        formula = f"{size.name} / {rate.name} + {rounds.name} x {latency.name}"
        return Figure(name, value, "s", formula, (size, rate, rounds, latency), _RING)

    def exposed(self, name: str, parts: tuple[Figure, ...]) -> Figure:
        """What does not hide under compute."""
        whole, hidden = total(f"{name}_all_s", "s", parts), self.given.assumed("communication_overlap")
        value, formula = whole.value * (1 - hidden.value), f"{whole.name} x (1 - {hidden.name})"
        return Figure(f"{name}_s", value, "s", formula, (whole, hidden))


class TrainingCommunication:
    """Of the forward passes and the update of one step, on so many GPUs."""

    def __init__(self, plan: PlanInput, gpus: int) -> None:
        self.plan = plan
        self.given, self.links = Given(plan), Links(plan)
        trainer = plan.trainer
        self._tensor = self.given.trainer("model_parallel")
        self._stages = self.given.trainer("pipeline_parallel")
        replica = trainer.model_parallel * trainer.pipeline_parallel
        self._replicas = Input("trainer_replicas", max(1, gpus // replica), "", "trainer_gpus / ranks of a replica")
        models, forward = 1 + trainer.critic, trainer.recompute_logprobs + trainer.reference + trainer.critic
        self._passes = Input(
            "layer_passes", forward + models * (2 + trainer.recompute_activations), "", "forward, backward, recomputed"
        )
        self._gathers = Input("weight_gathers", forward + 2 * models, "", "each forward and each backward pass")
        self._models = Input("trained_models", models, "", "[trainer]")

    @cached_property
    def _tokens(self) -> Figure:
        every, replicas = Tokens(self.plan).all, self._replicas
        value, formula = every.value / replicas.value, f"{every.name} / {replicas.name}"
        return Figure("replica_tokens", value, "tokens", formula, (every, replicas))

    @cached_property
    def micro_batches(self) -> Figure:
        tokens, size = self._tokens, self.given.trainer("micro_batch_tokens", "tokens")
        value, formula = max(1, math.ceil(tokens.value / size.value)), f"ceil({tokens.name} / {size.name})"
        return Figure("micro_batches", value, "", formula, (tokens, size))

    @cached_property
    def tensor_bytes(self) -> Figure:
        stage = self.given.stage_layers
        return all_reduce_bytes(
            "train_all_reduce_bytes", self._tokens, self.given.hidden, stage, self._passes, self._tensor
        )

    @cached_property
    def shards(self) -> tuple[Figure, ...]:
        """Weights gathered for every micro-batch, gradients scattered; experts stay where they are."""
        given, count = self.given, self.micro_batches
        parameters = Input("gathered_parameters", self.plan.shape.parameters_outside_experts / self._stages.value,
                           "", "of a stage, outside experts")  # fmt: skip
        gathers = Figure("gathers", count.value * self._gathers.value, "", f"{count.name} x {self._gathers.name}",
                         (count, self._gathers))  # fmt: skip
        scatters = Figure("scatters", count.value * self._models.value, "", f"{count.name} x {self._models.name}",
                          (count, self._models))  # fmt: skip
        weight, gradient = given.trainer("weight_bytes", "B"), given.trainer("gradient_bytes", "B")
        return (
            shard_bytes("train_gather_bytes", parameters, weight, gathers, self._tensor, self._replicas),
            shard_bytes("train_scatter_bytes", parameters, gradient, scatters, self._tensor, self._replicas),
        )

    @cached_property
    def expert_bytes(self) -> Figure | None:
        if not self.plan.shape.is_moe:
            return None
        given, tensor = self.given, self._tensor
        share = Figure("rank_tokens", self._tokens.value / tensor.value, "tokens",
                       f"{self._tokens.name} / {tensor.name}", (self._tokens, tensor))  # fmt: skip
        return all_to_all_bytes(
            "train_all_to_all_bytes", share, given.hidden, given.stage_sparse_layers, given.experts_per_token,
            self._passes, given.expert_ranks(self._replicas.value * tensor.value),
        )  # fmt: skip

    @cached_property
    def parts(self) -> tuple[Figure, ...]:
        """Seconds of each."""
        tensor, spread = self._tensor.value, self._replicas.value * self._tensor.value
        found = [self.links.seconds(self.tensor_bytes, tensor)]
        found += [self.links.seconds(part, spread) for part in self.shards]
        if self.expert_bytes is not None:
            found.append(self.links.seconds(self.expert_bytes, spread))
        return tuple(found)

    def bubble(self, compute: Quantity) -> Figure:
        """Of a pipeline; each update fills and drains it once."""
        updates = Input("updates", self.plan.trainer.updates, source="[trainer]")
        each = Figure("micro_batches_per_update", max(1.0, self.micro_batches.value / updates.value), "",
                      f"{self.micro_batches.name} / {updates.name}", (self.micro_batches, updates))  # fmt: skip
        share = bubble_share(self._stages, each)
        value, formula = share.value * compute.value, f"{share.name} x {compute.name}"
        return Figure("pipeline_bubble_s", value, "s", formula, (share, compute), _PIPELINE)

    @cached_property
    def exposed(self) -> Figure:
        return self.links.exposed("train_communication", self.parts)


class RolloutCommunication:
    """Of the instances of an engine: tensor parallel, or experts spread over them with attention beside."""

    def __init__(self, plan: PlanInput, instances: Quantity, decoding: Quantity) -> None:
        self.plan = plan
        self.given, self.links = Given(plan), Links(plan)
        self._instances, self._decoding = instances, decoding
        self._one = Input("engine_passes", 1, "", "forward")

    def _bytes(self, name: str, tokens: Quantity) -> Figure:
        given, ranks = self.given, self.given.instance_gpus
        if not self.plan.shape.is_moe:
            return all_reduce_bytes(name, tokens, given.hidden, given.layers, self._one, ranks)
        each = Figure(f"{tokens.name}_of_a_gpu", tokens.value / ranks.value, tokens.unit,
                      f"{tokens.name} / {ranks.name}", (tokens, ranks))  # fmt: skip
        return all_to_all_bytes(
            name, each, given.hidden, given.sparse_layers, given.experts_per_token, self._one, ranks
        )

    @cached_property
    def decode_step(self) -> Figure:
        """Seconds of one decode step; small messages, so that the latency of each collective counts."""
        layers = self.given.sparse_layers if self.plan.shape.is_moe else self.given.layers
        rounds = Figure("collectives_per_step", 2 * layers.value, "", f"2 x {layers.name}", (layers,))
        size = self._bytes("decode_step_communication_bytes", self._decoding)
        return self.links.seconds(size, self.given.instance_gpus.value, rounds)

    @cached_property
    def decode(self) -> Figure:
        """Of all decode steps of an instance."""
        sampled, step = Tokens(self.plan).sampled, self.decode_step
        value = step.value * sampled.value / (self._instances.value * self._decoding.value)
        formula = f"{step.name} x {sampled.name} / ({self._instances.name} x {self._decoding.name})"
        return Figure("decode_communication_s", value, "s", formula, (step, sampled, self._instances, self._decoding))

    @cached_property
    def prefill(self) -> Figure:
        new, instances = Tokens(self.plan).prefill_new, self._instances
        each = Figure("prefill_instance_tokens", new.value / instances.value, "tokens",
                      f"{new.name} / {instances.name}", (new, instances))  # fmt: skip
        return self.links.seconds(self._bytes("prefill_communication_bytes", each), self.given.instance_gpus.value)

    @cached_property
    def exposed(self) -> Figure:
        return self.links.exposed("rollout_communication", (self.decode, self.prefill))
