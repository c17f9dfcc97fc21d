"""Form `async`: generation never ends; the trainer takes a batch whenever one is ready; weights load in flight."""

from __future__ import annotations

from agentrl.plan.simulate.buffer import Batch, Buffer
from agentrl.plan.simulate.parameters import Parameters, Policy
from agentrl.plan.simulate.progress import Progress
from agentrl.plan.simulate.replicas import Replicas
from agentrl.plan.simulate.result import Result, Step, Tally, result_of

WINDOWS = 8
"""Parts of a step after which the trainer looks whether its batch is there."""


def simulate_async(parameters: Parameters, progress: Progress) -> Result:
    stream, steps, free = _Stream(parameters), [], 0.0
    for version in range(parameters.steps):
        stream.admit(version)
        batch, begin = stream.next(version, free)
        trained = begin + parameters.train_s
        stream.run_on(trained)
        ended = trained + parameters.sync_s
        stream.replicas.load(version + 1, trained, parameters.sync_s, parameters.policy is Policy.PARTIAL)
        lag, token_lag = stream.tally.train(batch.rows, version)
        tokens = float(batch.rows["tokens"].sum())
        steps.append(
            Step(free, batch.whole_at, begin, trained, ended, len(batch.rows), tokens, len(batch.stale), lag, token_lag)
        )
        free = ended
        progress(version + 1, parameters.steps)
    return result_of(parameters, steps, stream.tally, stream.replicas)


class _Stream:
    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.replicas = Replicas(parameters)
        self.tally = Tally()
        self._buffer = Buffer(parameters)
        self._consumed = 0
        # The trainer must not notice its batch later than it would have finished training on it.
        self._window = min(parameters.generation_s / WINDOWS, parameters.train_s)

    def admit(self, version: int) -> None:
        """Hand in as many trajectories as the bound on the lag allows, or as keep every place taken without one."""
        known, there = self.parameters, self.replicas.unfinished
        if known.policy is Policy.BACKFILL:
            self.replicas.hand_in(max(0, known.replicas * known.places + 8 * known.batch - there))
            return
        there += len(self._buffer)
        if known.policy is Policy.DROP:
            # What is too old by now is only waiting to be thrown away: others are sampled in its stead.
            oldest = version - known.max_lag
            there -= self.replicas.begun_before(oldest) + self._buffer.begun_before(oldest)
        bound = (known.max_lag + version + 1) * known.batch
        self.replicas.hand_in(max(0, bound - self._consumed - there))

    def next(self, version: int, free: float) -> tuple[Batch, float]:
        """The batch of this version, and when the trainer, idle from `free` on, can begin with it."""
        self.run_on(free)
        now = free
        while (batch := self._take(version)) is None:
            now += self._window
            self.run_on(now)
        self._consumed += len(batch.rows)
        self.tally.drop(batch.stale["tokens"], float(batch.stale["tokens"].sum()))
        return batch, max(free, batch.whole_at)

    def run_on(self, until: float) -> None:
        self._buffer.add(self.replicas.advance(until))

    def _take(self, version: int) -> Batch | None:
        known = self.parameters
        oldest = version - known.max_lag
        if known.policy is Policy.DROP:
            return self._buffer.take(known.batch, fresh_from=oldest)
        if known.policy is Policy.WAIT:
            # What began so early that the next version would find it over the bound must be in this batch.
            waiting = (self.replicas.oldest_version(), self._buffer.oldest_unwhole())
            if any(found is not None and found <= oldest for found in waiting):
                return None
            return self._buffer.take(known.batch, due_until=oldest)
        return self._buffer.take(known.batch)
