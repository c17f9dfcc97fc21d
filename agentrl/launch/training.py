"""A training run on this machine, from its folder to its last process. Used by `agentrl train`.

Invariant: the folder's status says what became of the launch, and no process or sandbox of it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.launch.endpoints import Endpoints
from agentrl.launch.layout import RunFolder
from agentrl.launch.local import Supervisor, Watcher
from agentrl.launch.plan import child, services
from agentrl.launch.status import RunStatus


class PhaseWatcher(Watcher, Protocol):
    def phase(self, name: str) -> None:
        """The launch enters the phase `warm_start` or `services`; later ones are the rollout's to tell."""
        ...


async def train(folder: RunFolder, config: RunConfig, endpoints: Endpoints, watcher: PhaseWatcher) -> None:
    """Run to the last evaluation. Raises LaunchError with the traceback of the process that failed."""
    async with Supervisor(folder.logs, restarts=config.launch.restarts, watcher=watcher) as supervisor:
        await make_policy(supervisor, folder, config, watcher)
        watcher.phase("services")
        await supervisor.start(services(folder, config, endpoints))
        trainer = child("trainer", folder, threads=config.train.threads)
        await supervisor.finish([trainer, child("rollout", folder)])


async def make_policy(supervisor: Supervisor, folder: RunFolder, config: RunConfig, watcher: PhaseWatcher) -> None:
    """See that there is a policy to start from: a given model as it is, or one from the warm start."""
    if folder.warm.exists():
        return
    if config.model.path and not config.warm_start.steps:
        _check_model(Path(config.model.path))
        folder.adopt_model(Path(config.model.path))
        return
    watcher.phase("warm_start")
    await supervisor.finish([child("warm_start", folder, threads=config.warm_start.threads)])


def _check_model(path: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"model.path = {str(path)!r} is no model folder: it has no {' and no '.join(missing)}")


@asynccontextmanager
async def recorded(folder: RunFolder) -> AsyncIterator[None]:
    """Keep the folder's status up to date around the launch."""
    status = RunStatus.begin()
    status.write(folder.status)
    try:
        yield
    except asyncio.CancelledError:
        status.ended("stopped").write(folder.status)
        raise
    except Exception as error:
        what = f"{error.code}: {error.message}" if isinstance(error, AgentRLError) else repr(error)
        status.ended("failed", what).write(folder.status)
        raise
    status.ended("done").write(folder.status)
