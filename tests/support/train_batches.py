"""Batches of groups as the buffer hands them out, with random tokens. For tests of the trainer."""

from __future__ import annotations

import random

from tiny_models import VOCAB

from agentrl.core.protocols import Batch
from agentrl.core.types import Attempt, Episode, Failed, Group, Provenance, Sampling, Scored, Stop, Task, Trajectory


def provenance(sampling: Sampling | None = None) -> Provenance:
    return Provenance(tokenizer="t", renderer="r", engine="e/1", sampling=sampling or Sampling())


def trajectory(
    name: str, rng: random.Random, *, version: int = 0, length: int | None = None, sampling: Sampling | None = None
) -> Trajectory:
    """Random tokens, about half of them trained."""
    length = length or rng.randrange(8, 40)
    mask = [0, *(rng.randrange(2) for _ in range(length - 2)), 1]
    return Trajectory(
        id=name,
        session_id=f"session-{name}",
        token_ids=tuple(rng.randrange(VOCAB) for _ in range(length)),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(-4 - rng.random() if m else None for m in mask),
        policy_versions=tuple(version if m else None for m in mask),
        finish="terminated",
        session_tokens=sum(mask),
        provenance=provenance(sampling),
    )


def episode(name: str, group: str, outcome: Scored | Failed, *trajectories: Trajectory, task: Task) -> Episode:
    return Episode(
        id=name, group_id=group, index=0, task=task, env_version="1", session_id=f"session-{name}", sandbox_id=None,
        trajectories=trajectories, attempt=Attempt(stop=Stop.DONE, turns=1, transcript=()), outcome=outcome,
    )  # fmt: skip


def make_batch(step: int = 1, *, groups: int = 3, size: int = 4, version: int = 0, seed: int = 0) -> Batch:
    """Groups with rewards 0 and 1 in turn."""
    rng = random.Random(f"{seed} {step}")
    made = []
    for g in range(groups):
        task = Task(env="test", id=f"task-{g}", source="even" if g % 2 == 0 else "odd")
        episodes = tuple(
            episode(f"{step}.{g}.{i}", f"{step}.{g}", Scored(reward=float(i % 2)),
                    trajectory(f"{step}.{g}.{i}", rng, version=version), task=task)
            for i in range(size)
        )  # fmt: skip
        made.append(Group(id=f"{step}.{g}", task=task, size=size, episodes=episodes))
    return Batch(step=step, groups=tuple(made))


class MemorySource:
    """See `protocols.SampleSource`, without a store: hands out `make_batch` and keeps what it was told."""

    def __init__(self) -> None:
        self.claimed: dict[int, int] = {}
        """Version at which each step was taken; a final claim stays."""
        self.committed: dict[int, str] = {}
        """Checkpoint by step."""
        self.versions: dict[int, int] = {}
        """Step by recorded version."""
        self.events: list[str] = []

    async def take(self, step: int, *, version: int, groups: int) -> Batch:
        self.events.append(f"take {step}")
        self.claimed[step] = version
        return make_batch(step, groups=groups, version=version)

    async def commit(self, step: int, *, version: int, checkpoint: str) -> None:
        self.events.append(f"commit {step} {checkpoint}")
        self.committed.update({taken: checkpoint for taken in self.claimed if taken <= step})

    async def rewind(self, step: int) -> None:
        self.events.append(f"rewind {step}")
        for table in (self.claimed, self.committed):
            for later in [taken for taken in table if taken > step]:
                del table[later]

    async def publish_version(self, version: int, *, step: int, path: str) -> None:
        self.events.append(f"record {version}")
        assert version not in self.versions
        self.versions[version] = step

    async def latest_version(self) -> int:
        return max(self.versions, default=-1)
