"""What the simulator needs to know of a step: counts, rates and distributions. Made by `adapter` from a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.core.errors import ConfigError
from agentrl.plan.choice.forms import Form
from agentrl.plan.workload import Lengths


class Policy(StrEnum):
    """What becomes of trajectories that are not finished when the others are."""

    WAIT = "wait"
    """The step waits for them. async: for those that would exceed `max_lag` at the next version."""
    DROP = "drop"
    """They are thrown away. async: samples over `max_lag` are, when the trainer takes its batch."""
    PARTIAL = "partial"
    """They are cut and continued with the new weights, for the price of a prefill of what they have so far."""
    BACKFILL = "backfill"
    """As `partial`, and freed places take the next tasks at once. async: without a bound on the lag."""


@dataclass(frozen=True, slots=True)
class Parameters:
    form: Form
    policy: Policy
    replicas: int
    """Inference instances that generate at the same time."""
    concurrency: int
    """Trajectories that a replica holds at once; further ones queue at it."""
    batch: int
    """Trajectories that the trainer takes a step (B x G)."""
    steps: int
    tokens: Lengths
    """Sampled tokens of a turn."""
    decode_base_s: float
    """Seconds of a decode step that do not depend on the sequences in it (reading the weights)."""
    decode_sequence_s: float
    """Further seconds of a decode step for each sequence in it (reading its KV)."""
    train_s: float
    """Seconds of the forward and backward passes over a batch, on the GPUs that train in this form."""
    sync_s: float = 0.0
    """Seconds during which new weights are loaded and nothing is generated."""
    decode_limit: int = 0
    """Sequences that a replica decodes at once; the turns of further ones wait. 0: all that it holds."""
    turns: int = 1
    environment: Lengths = field(default_factory=Lengths)
    """Seconds of the execution after each turn."""
    prefill_s: float = 0.0
    """Seconds at the start of each turn in which the replica does nothing else."""
    continue_s_per_token: float = 0.0
    """Seconds to prefill a token of an interrupted trajectory."""
    sandboxes: int = 0
    """Of all replicas; each has its share. 0: as many as are needed."""
    sandbox_held: bool = True
    """A trajectory keeps its sandbox from its first turn to its last; otherwise only while an execution runs."""
    over_issue: float = 1.25
    """Trajectories in flight at the start of a step for each that it needs (`drop` and `partial`; not `async`)."""
    max_lag: int = 4
    """async: bound of the versions between sampling and training."""
    group_size: int = 1
    """Trajectories of a task; the trainer takes whole groups. 1: takes trajectories as they finish."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("replicas", "concurrency", "batch", "steps", "turns", "group_size")
        wrong = [f"{name} must be at least 1, is {getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        times = ("decode_base_s", "decode_sequence_s", "train_s", "sync_s", "prefill_s", "continue_s_per_token")
        wrong += [
            f"{name} must be a number of seconds from 0, is {getattr(self, name)}"
            for name in times
            if not 0 <= getattr(self, name) < math.inf
        ]
        if self.form is Form.COLOCATED_ASYNC and self.policy not in (Policy.PARTIAL, Policy.BACKFILL):
            wrong.append(
                f"form {self.form} continues what is cut: policy must be partial or backfill, is {self.policy}"
            )
        if self.form is Form.ASYNC and self.train_s <= 0:
            wrong.append("train_s must be above 0 for form async")
        if self.decode_limit < 0:
            wrong.append(f"decode_limit must be at least 0, is {self.decode_limit}")
        if self.over_issue < 1:
            wrong.append(f"over_issue must be at least 1, is {self.over_issue}")
        if 0 < self.sandboxes < self.replicas:
            wrong.append(f"sandboxes must be 0 or at least one a replica ({self.replicas}), is {self.sandboxes}")
        if self.batch % self.group_size:
            wrong.append(f"batch {self.batch} must be a multiple of group_size {self.group_size}")
        if wrong:
            raise ConfigError("simulation: " + "; ".join(wrong))

    @property
    def has_environment(self) -> bool:
        return self.environment.mean > 0

    @property
    def places(self) -> int:
        """Trajectories that a replica can hold, given its share of sandboxes."""
        if self.sandboxes and self.sandbox_held and self.has_environment:
            return min(self.concurrency, self.sandboxes // self.replicas)
        return self.concurrency

    def decode_step_s(self, running: float) -> float:
        """Seconds of a decode step with this many sequences."""
        return self.decode_base_s + self.decode_sequence_s * running

    @property
    def generation_s(self) -> float:
        """Roughly, to generate a batch with every place taken; a scale for windows and bins, not a prediction."""
        held = min(self.places, math.ceil(self.batch / self.replicas))
        decoding = min(held, self.decode_limit or held)
        one = self.turns * (self.tokens.mean * self.decode_step_s(decoding) + self.environment.mean + self.prefill_s)
        return one * max(1.0, self.batch / self.replicas / held)
