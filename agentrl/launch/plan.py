"""Which processes a run needs, and how each is started. Used by `training`, `evaluation` and by tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from agentrl.core.config import RunConfig
from agentrl.launch.endpoints import Endpoints, embedded_engines
from agentrl.launch.layout import RunFolder
from agentrl.launch.process import Role


def child(role: str, folder: RunFolder, *, url: str = "", argument: str = "", threads: int = 1) -> Role:
    """A role of this run as a child process of the launcher."""
    argv = (sys.executable, "-m", "agentrl.launch.child", role, str(folder.path.absolute()))
    return Role(role, (*argv, argument) if argument else argv, url, _threads(threads))


def _threads(count: int) -> Mapping[str, str]:
    """Numeric libraries size their pools when they load, before any room could tell them."""
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


def services(folder: RunFolder, config: RunConfig, endpoints: Endpoints) -> list[Role]:
    """The services that the config does not place elsewhere."""
    roles = [
        child(name, folder, url=endpoints.url(name), threads=config.engine.threads) for name in embedded_engines(config)
    ]
    elsewhere = {"gateway": config.gateway.url, "sandbox": config.sandbox.url, "reward": config.reward.url}
    roles += [child(name, folder, url=endpoints.url(name)) for name, url in elsewhere.items() if not url]
    return roles
