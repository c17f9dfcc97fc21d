"""The stream of training tasks, resumed at a durable position. Used by the producer.

Invariant: position p of a given environment, seed and limits is always the same task; a finite
environment starts over when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.core.environment import Environment
from agentrl.core.errors import RolloutError
from agentrl.core.types import Limits, Task


def bounded(task: Task, limits: Limits) -> Task:
    """The task under the tighter of its own and the run's limits."""
    own = task.limits
    tighter = Limits(
        turns=min(own.turns, limits.turns),
        tokens=min(own.tokens, limits.tokens),
        wall_s=min(own.wall_s, limits.wall_s),
    )
    return task.model_copy(update={"limits": tighter})


class TaskStream:
    """An endless iterator over the training tasks that knows its position."""

    def __init__(self, environment: Environment, *, seed: int, limits: Limits, position: int) -> None:
        self._environment = environment
        self._limits = limits
        self._tasks = self._endless(seed)
        self.position = 0
        """Tasks drawn so far, over all processes of the run."""
        while self.position < position:
            self.draw()

    def draw(self) -> Task:
        task = next(self._tasks)
        self.position += 1
        return bounded(task, self._limits)

    def _endless(self, seed: int) -> Iterator[Task]:
        while True:
            task = None
            for task in self._environment.tasks("train", seed):
                yield task
            if task is None:
                raise RolloutError(f"environment {self._environment.name} has no training tasks for seed {seed}")
