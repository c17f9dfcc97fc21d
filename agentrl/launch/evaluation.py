"""An evaluation by itself, with its own processes and store. Used by `agentrl eval`.

Invariant: the run that is evaluated is only read; results lie in a folder of their own.
"""

from __future__ import annotations

import itertools

from agentrl.core.config import RunConfig, StoreConfig, load_config
from agentrl.launch.endpoints import Endpoints
from agentrl.launch.layout import RunFolder
from agentrl.launch.local import Supervisor
from agentrl.launch.plan import child, services
from agentrl.launch.training import PhaseWatcher, make_policy

LABEL = "eval"
"""Under which the store keeps the results."""


def evaluation_of(run: RunFolder, overrides: tuple[str, ...]) -> tuple[RunFolder, RunConfig]:
    """A fresh folder inside the run's, whose policy is the run's newest."""
    folders = (RunFolder(run.evals / str(n)) for n in itertools.count(1))
    folder = next(one for one in folders if not one.exists)
    config = load_config(run.config_file, overrides)
    # Its own store, also where the run's is a shared database: the run's evaluations are part of its record.
    config = config.model_copy(update={"name": f"{run.name}-eval", "store": StoreConfig()})
    folder.create(config)
    folder.adopt_model(run.warm.resolve())
    folder.weights.symlink_to(run.weights.absolute(), target_is_directory=True)
    return folder, config


async def evaluate_policy(folder: RunFolder, config: RunConfig, endpoints: Endpoints, watcher: PhaseWatcher) -> None:
    """Play the held-out tasks once; the results are in the folder's store."""
    async with Supervisor(folder.logs, restarts=config.launch.restarts, watcher=watcher) as supervisor:
        await make_policy(supervisor, folder, config, watcher)
        watcher.phase("services")
        await supervisor.start(services(folder, config, endpoints))
        watcher.phase("eval")
        await supervisor.finish([child("evaluation", folder, argument=LABEL)])
