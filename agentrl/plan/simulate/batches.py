"""The forms that work batch by batch: one pool or two taking turns, or two pools with one batch between them."""

from __future__ import annotations

import copy
import math

from agentrl.plan.simulate.buffer import Batch, Buffer
from agentrl.plan.simulate.parameters import Parameters, Policy
from agentrl.plan.simulate.progress import Progress
from agentrl.plan.simulate.replicas import Replicas
from agentrl.plan.simulate.result import Result, Step, Tally, result_of

WINDOWS = 16
"""Parts of a batch's generation in which the moment is searched at which enough of it has finished."""


def simulate_sync(parameters: Parameters, progress: Progress) -> Result:
    """Generate, train, load the weights, one after the other."""
    generation, steps, now = _Generation(parameters), [], 0.0
    for version in range(parameters.steps):
        batch, generated = generation.next(now)
        trained = generated + parameters.train_s
        ended = trained + parameters.sync_s
        generation.replicas.load(version + 1, generated, ended - generated, generation.interrupts)
        steps.append(generation.step(batch, version, now, generated, generated, trained, ended))
        now = ended
        progress(version + 1, parameters.steps)
    return result_of(parameters, steps, generation.tally, generation.replicas)


def simulate_one_step(parameters: Parameters, progress: Progress) -> Result:
    """While a batch is trained, the next one is generated with the weights from before that training."""
    generation, steps = _Generation(parameters), []
    batch, now = generation.next(0.0)
    began, dropped = 0.0, generation.dropped
    for version in range(parameters.steps):
        trained = now + parameters.train_s
        following, generated = generation.next(now)
        met = max(trained, generated)
        if generation.interrupts:
            generation.run_on(met)
        ended = met + parameters.sync_s
        generation.replicas.load(version + 1, met, parameters.sync_s, generation.interrupts)
        generation.dropped, dropped = dropped, generation.dropped
        steps.append(generation.step(batch, version, began, generated, now, trained, ended))
        batch, now, began = following, ended, ended
        progress(version + 1, parameters.steps)
    return result_of(parameters, steps, generation.tally, generation.replicas)


class _Generation:
    """Generates one batch after the other."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.replicas = Replicas(parameters)
        self.tally = Tally()
        self.dropped = 0
        """Trajectories thrown away for the latest batch."""
        self._buffer = Buffer(parameters)

    @property
    def interrupts(self) -> bool:
        """New weights find trajectories in flight."""
        return self.parameters.policy in (Policy.PARTIAL, Policy.BACKFILL)

    def next(self, from_s: float) -> tuple[Batch, float]:
        """Generate from `from_s` until there is a batch; returns it and when generation stopped for it."""
        self.replicas.advance(from_s)
        self.replicas.hand_in(self._missing())
        if self.parameters.policy is Policy.WAIT:
            self.run_on(math.inf)
            batch = self._take()
            return batch, batch.whole_at
        batch = self._search(from_s)
        stop = max(from_s, batch.whole_at)
        if self.parameters.policy is Policy.DROP:
            lengths, wasted = self.replicas.discard(stop)
            spare = self._buffer.clear()["tokens"]
            self.tally.drop(lengths, wasted)
            self.tally.drop(spare, float(spare.sum()))
            self.dropped = len(lengths) + len(spare)
        return batch, stop

    def run_on(self, until: float) -> None:
        self._buffer.add(self.replicas.advance(until))

    def step(
        self,
        batch: Batch,
        version: int,
        began: float,
        generated: float,
        train_began: float,
        trained: float,
        ended: float,
    ) -> Step:
        lag, token_lag = self.tally.train(batch.rows, version)
        return Step(
            began, generated, train_began, trained, ended, len(batch.rows), float(batch.rows["tokens"].sum()),
            self.dropped, lag, token_lag,
        )  # fmt: skip

    def _missing(self) -> int:
        """Trajectories to hand in for the next batch."""
        known = self.parameters
        if known.policy is Policy.WAIT:
            return known.batch
        if known.policy is Policy.DROP:
            return math.ceil(known.over_issue * known.batch)
        there = self.replicas.unfinished
        if known.policy is Policy.PARTIAL:
            return max(0, math.ceil(known.over_issue * known.batch) - there - len(self._buffer))
        # Enough that no place stays free until this batch is there.
        return max(0, known.replicas * known.places + 8 * known.batch - there)

    def _search(self, from_s: float) -> Batch:
        """Run window by window; go back to the beginning of the last one, and stop when the batch became whole."""
        window, until = self.parameters.generation_s / WINDOWS, from_s
        before = None
        while (batch := self._buffer.take(self.parameters.batch)) is None:
            before, until = (copy.deepcopy(self.replicas), copy.copy(self._buffer)), until + window
            self.run_on(until)
        if before is None:
            return batch
        self.replicas, self._buffer = before
        self.run_on(batch.whole_at)
        return self._take()

    def _take(self) -> Batch:
        batch = self._buffer.take(self.parameters.batch)
        if batch is None:
            raise AssertionError(f"{len(self._buffer)} trajectories finished, but no batch of {self.parameters.batch}")
        return batch
