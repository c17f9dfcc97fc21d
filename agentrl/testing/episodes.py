"""Finished episodes and groups out of thin air, consistent as the store would hold them. Used by tests."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.types import Attempt, Episode, Group, Outcome, Scored, Stop, Task
from agentrl.testing.sessions import scripted_trajectory


def scripted_episode(
    id_: str, *, group_id: str, index: int = 0, outcome: Outcome | None = None, versions: Sequence[int] = (0, 0)
) -> Episode:
    """An episode with one call for each of `versions`; its reward is 1 unless `outcome` says otherwise."""
    session_id = f"session-{id_}"
    return Episode(
        id=id_, group_id=group_id, index=index, task=Task(env="plain", id=group_id, source="plain"), env_version="1",
        session_id=session_id, sandbox_id=None, trajectories=(scripted_trajectory(session_id, versions=versions),),
        attempt=Attempt(stop=Stop.ANSWERED, turns=len(versions), transcript=()),
        outcome=outcome or Scored(reward=1.0, verifier="scripted/1"),
    )  # fmt: skip


def scripted_group(id_: str, *, rewards: Sequence[float], versions: Sequence[int] = (0, 0)) -> Group:
    """A group with one accepted episode for each reward."""
    episodes = tuple(
        scripted_episode(
            f"{id_}-{i}", group_id=id_, index=i, versions=versions, outcome=Scored(reward=reward, verifier="scripted/1")
        )
        for i, reward in enumerate(rewards)
    )
    return Group(id=id_, task=episodes[0].task, size=len(rewards), episodes=episodes)
