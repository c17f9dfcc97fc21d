"""The addresses and the token that one run's processes find each other by. Written by the launcher, read by children.

Invariant: a role keeps its address and token over restarts, so whoever waits for it only has to retry.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import Value

TOKEN_VARIABLE = "AGENTRL_TOKEN"
"""Environment variable with the token of services that run elsewhere."""

PORTS = range(20_000, 32_000)


class Endpoints(Value):
    token: str
    """Bearer token of every service of the run."""
    urls: Mapping[str, str]
    """Base URL by role."""

    def url(self, role: str) -> str:
        try:
            return self.urls[role]
        except KeyError:
            raise ConfigError(f"no address for role {role!r} (known: {', '.join(self.urls)})") from None

    def port(self, role: str) -> int:
        return urlsplit(self.url(role)).port or 80

    @property
    def engines(self) -> tuple[str, ...]:
        """Base URLs of all replicas."""
        return tuple(url for role, url in self.urls.items() if role.startswith("engine-"))

    @classmethod
    def read(cls, path: Path) -> Endpoints:
        return cls.model_validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Whole or not at all, and never readable by others: it holds the token."""
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.model_dump_json(indent=1))
        draft.replace(path)


def embedded_engines(config: RunConfig) -> tuple[str, ...]:
    """Roles of the replicas that the launcher starts itself."""
    return () if config.engine.urls else tuple(f"engine-{n}" for n in range(config.engine.replicas))


def choose_endpoints(config: RunConfig) -> Endpoints:
    """Loopback ports for the roles that run here, the config's URLs for those that run elsewhere."""
    here: list[str] = [*embedded_engines(config), "rollout", "trainer"]
    urls = {f"engine-{n}": url for n, url in enumerate(config.engine.urls)}
    for role, url in (("gateway", config.gateway.url), ("sandbox", config.sandbox.url), ("reward", config.reward.url)):
        if url:
            urls[role] = url
        else:
            here.append(role)
    urls |= {role: f"http://127.0.0.1:{port}" for role, port in zip(here, _free_ports(len(here)), strict=True)}
    return Endpoints(token=os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24), urls=urls)


def kept_endpoints(path: Path, config: RunConfig) -> Endpoints:
    """The addresses of an earlier launch when they still fit the config and nobody took a port, else new ones."""
    fresh = choose_endpoints(config)
    if not path.exists():
        return fresh
    kept = Endpoints.read(path)
    same_roles = kept.urls.keys() == fresh.urls.keys()
    mine = [url for url in kept.urls.values() if urlsplit(url).hostname == "127.0.0.1"]
    return kept if same_roles and all(_can_bind(urlsplit(url).port or 0) for url in mine) else fresh


def _free_ports(count: int) -> Sequence[int]:
    """Distinct free ports below the kernel's ephemeral range.

    A client that retries a dead port inside that range can be given the port as its own and then keeps the
    restarted service from binding it.
    """
    candidates = random.SystemRandom().sample(PORTS, len(PORTS))
    free = itertools.islice(filter(_can_bind, candidates), count)
    return list(free)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
