"""A trainer that dies in a step of the form `sync`: the groups it had claimed are trained by its successor."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCAB, tiny_model

from agentrl.core.config import TrainConfig
from agentrl.core.db import Database, sqlite_url
from agentrl.core.protocols import Applied, Batch
from agentrl.core.types import Scored, Task, WeightManifest
from agentrl.rollout.acceptance import judge
from agentrl.rollout.audit import audit
from agentrl.rollout.buffer import Buffer
from agentrl.rollout.staleness import Staleness
from agentrl.rollout.store import Issue, Store, open_store_database
from agentrl.testing.episodes import scripted_episode
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.loop import TrainerParts, run_trainer
from agentrl.train.trainer import Trainer
from agentrl.weights.publish import WeightFolder

GROUPS = 2


class Killed(Exception):
    """What ends the first process."""


class Served:
    """A publisher whose replicas take every version; rollout then fills the next step's groups with it."""

    def __init__(self, store: Store, *, steps: int) -> None:
        self._store, self._steps = store, steps
        self.versions: list[int] = []

    async def apply(self, manifest: WeightManifest, path: Path) -> Applied:
        self.versions.append(manifest.version)
        if await self._store.cursor() == GROUPS * manifest.step < GROUPS * self._steps:
            for _ in range(GROUPS):
                await self._ready(manifest.version)
        return Applied(urls=("replica",), samples=())

    async def _ready(self, version: int) -> None:
        """A group as rollout leaves it, sampled by `version`."""
        position = await self._store.cursor() + 1
        name = f"g{position}"
        issued = Issue(name, Task(env="plain", id=name, source="plain"), (f"{name}-0", f"{name}-1"))
        await self._store.issue(issued, position=position, version=version)
        for index, id_ in enumerate(issued.episode_ids):
            outcome = Scored(reward=float(index), verifier="1")
            played = scripted_episode(id_, group_id=name, index=index, outcome=outcome, versions=(version,))
            (path,) = played.trajectories
            path = path.model_copy(update={"token_ids": tuple(token % VOCAB for token in path.token_ids)})
            played = played.model_copy(update={"trajectories": (path,)})
            await self._store.finish(played, judge(played))
        await self._store.end_group(name, None, version=version)


class Dying(Buffer):
    """Its process is gone once the groups of step 2 are claimed."""

    async def take(self, step: int, *, version: int, groups: int) -> Batch:
        batch = await super().take(step, version=version, groups=groups)
        if step == 2:
            raise Killed
        return batch


class NoSink:
    def write(self, step: int, values: object) -> None:
        """Nobody reads them."""

    def close(self) -> None:
        """Nothing to release."""


async def process(kind: type[Buffer], database: Database, folder: Path, publisher: Served) -> None:
    """One trainer process, from its start to its end or death."""
    config = TrainConfig(steps=3)
    staleness = Staleness(limit=0, groups=GROUPS, paced=True)
    parts = TrainerParts(
        trainer=Trainer(tiny_model(), config, seed=7), source=kind(database, staleness=staleness, min_scored=2),
        weights=WeightFolder(folder / "weights", vocab_size=VOCAB, tolerance=1e-4, keep=3), publisher=publisher,
        checkpoints=Checkpoints(folder / "checkpoints", keep=2), sink=NoSink(), groups=GROUPS,
    )  # fmt: skip
    await run_trainer(parts, config)


@pytest.mark.timeout(60)
async def test_claimed_groups_survive_the_trainer(tmp_path: Path) -> None:
    database = await open_store_database(sqlite_url(tmp_path / "rollout.db"))
    publisher = Served(Store(database), steps=3)
    with pytest.raises(Killed):
        await process(Dying, database, tmp_path, publisher)
    await process(Buffer, database, tmp_path, publisher)
    report = await audit(database)
    await database.close()
    assert report.ok
    assert report.groups == {"trained": 3 * GROUPS}
    assert (report.steps, report.swept_samples) == (3, 0)
    assert publisher.versions == [0, 1, 1, 2, 3]
