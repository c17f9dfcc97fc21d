"""What a simulation found: one value a step, and distributions over trajectories, replicas and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl.plan.simulate.draws import Floats, Ints
from agentrl.plan.simulate.parameters import Parameters
from agentrl.plan.simulate.replicas import Replicas, Rows

BUCKETS, LAGS = 24, 33
"""Lengths are counted in powers of two, lags up to 32 and more."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Times are seconds since the simulation began."""

    began: float
    """When the step before had ended."""
    generated: float
    """When its last trajectory was there."""
    train_began: float
    trained: float
    ended: float
    """When the new weights were loaded."""
    trajectories: int
    tokens: float
    dropped: int
    """Trajectories that were sampled, at least in part, and thrown away."""
    lag_mean: float
    """Versions between the first token of a trajectory and its training, mean over trajectories."""
    token_lag_mean: float
    """The same for each token, mean over tokens."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class Tally:
    """Counts of trajectories by length (power of two) and lag."""

    trained: Ints = field(default_factory=lambda: np.zeros((BUCKETS, LAGS), dtype=np.int64))
    dropped: Ints = field(default_factory=lambda: np.zeros(BUCKETS, dtype=np.int64))
    wasted_tokens: float = 0.0

    def train(self, rows: Rows, version: int) -> tuple[float, float]:
        """Count a batch that version `version` is trained on; returns mean lag by trajectory and by token."""
        lag = version - rows["version"]
        np.add.at(self.trained, (bucket(rows["tokens"]), np.clip(lag, 0, LAGS - 1)), 1)
        tokens = float(rows["tokens"].sum())
        return float(lag.mean()), max(0.0, version - float(rows["weighted"].sum()) / tokens)

    def drop(self, lengths: Floats, wasted_tokens: float) -> None:
        np.add.at(self.dropped, bucket(lengths), 1)
        self.wasted_tokens += wasted_tokens


def bucket(lengths: Floats) -> Ints:
    """Bucket b holds lengths from 2**b to 2**(b+1)."""
    return np.clip(np.log2(np.maximum(lengths, 1.0)).astype(np.int64), 0, BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class Series:
    """A number of things over time."""

    bin_s: float
    values: Ints
    """At the end of each bin."""
    mean: float

    @property
    def peak(self) -> int:
        return int(self.values.max(initial=0))


@dataclass(frozen=True, slots=True)
class Result:
    parameters: Parameters
    steps: Sequence[Step]
    tally: Tally
    in_flight: Series
    """Trajectories that hold a place."""
    sandboxes: Series
    """Sandboxes in use."""
    idle_share: Floats
    """Of each replica's time, the part in which it decoded nothing."""
    place_use: float
    """Of all places' time, the part in which a sequence decoded there."""
    continued_tokens: float
    """Tokens that were prefilled again after interruptions."""
    sandbox_wait_s: float
    """Mean wait of an execution for a sandbox."""

    @property
    def steady(self) -> Sequence[Step]:
        """Without the first quarter, in which a pipeline fills."""
        return self.steps[len(self.steps) // 4 :]

    @property
    def step_s(self) -> float:
        """Seconds of a step, mean over the steady ones."""
        return float(np.mean([step.seconds for step in self.steady]))

    @property
    def generation_s(self) -> float:
        """Seconds until a step's batch was there, mean over the steady ones; less where generation runs ahead."""
        return float(np.mean([max(0.0, step.generated - step.began) for step in self.steady]))

    @property
    def tail_s(self) -> float:
        """What the generation of a batch took beyond its tokens' share of full replicas."""
        known = self.parameters
        held = min(known.places, known.batch / known.replicas)
        tokens = float(np.mean([step.tokens for step in self.steady]))
        return max(0.0, self.generation_s - tokens * known.decode_step_s(held) / (held * known.replicas))

    @property
    def tail_share(self) -> float:
        """Of the generation time."""
        return self.tail_s / self.generation_s if self.generation_s else 0.0

    @property
    def trainer_idle(self) -> float:
        """Of the steady steps' time, the part in which the trainer had nothing to train on."""
        trained = sum(step.trained - step.train_began for step in self.steady)
        return 1 - trained / (self.steady[-1].ended - self.steady[0].began)

    @property
    def lag_mean(self) -> float:
        return float(np.mean([step.lag_mean for step in self.steady]))

    @property
    def token_lag_mean(self) -> float:
        return float(np.mean([step.token_lag_mean for step in self.steady]))

    @property
    def dropped_share(self) -> float:
        """Of all trajectories that left generation."""
        dropped = int(self.tally.dropped.sum())
        return dropped / max(1, dropped + int(self.tally.trained.sum()))


def result_of(parameters: Parameters, steps: Sequence[Step], tally: Tally, replicas: Replicas) -> Result:
    until = steps[-1].ended
    places = parameters.replicas * parameters.places
    pools = replicas.pools
    return Result(
        parameters, tuple(steps), tally,
        Series(replicas.in_flight.bin_s, replicas.in_flight.series(), replicas.in_flight.mean(until)),
        Series(replicas.sandboxes.bin_s, replicas.sandboxes.series(), replicas.sandboxes.mean(until)),
        idle_share=np.clip(1 - replicas.decoding_s / until, 0.0, 1.0),
        place_use=float(replicas.sequence_s.sum()) / (places * until),
        continued_tokens=replicas.continued_tokens,
        sandbox_wait_s=pools.waited_s / pools.served if pools and pools.served else 0.0,
    )  # fmt: skip
