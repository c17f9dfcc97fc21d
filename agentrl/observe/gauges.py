"""Reads the /metrics pages of a run's services, and the rollout's status page. Used by the live view.

Invariant: a service that does not answer just keeps its last numbers; watching a run never disturbs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from agentrl.core.errors import AgentRLError
from agentrl.core.http import Service


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of one service."""

    role: str
    name: str
    labels: Mapping[str, str]
    value: float


def parse(role: str, page: str) -> list[Reading]:
    """The samples of a page in Prometheus' text format."""
    families = text_string_to_metric_families(page)
    return [Reading(role, s.name, s.labels, s.value) for family in families for s in family.samples]


class Gauges:
    """The latest numbers of every service."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._services = {role: Service(url, timeout_s=2.0) for role, url in urls.items()}
        self._readings: dict[str, list[Reading]] = {}

    async def refresh(self) -> None:
        """Ask all services at once."""
        await asyncio.gather(*(self._refresh(role, service) for role, service in self._services.items()))

    async def _refresh(self, role: str, service: Service) -> None:
        try:
            page = await service.request("GET", "/metrics")
        except AgentRLError:
            return
        self._readings[role] = parse(role, page.text)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over services and label values; None when nobody reports it."""
        found = [r.value for r in self._named(name) if all(r.labels.get(k) == v for k, v in labels.items())]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for reading in self._named(name):
            key = reading.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + reading.value
        return sums

    def _named(self, name: str) -> list[Reading]:
        return [r for readings in self._readings.values() for r in readings if r.name == name]

    async def close(self) -> None:
        for service in self._services.values():
            await service.close()


class StatusPage:
    """The rollout process's own account of where it is."""

    def __init__(self, url: str, token: str) -> None:
        self._service = Service(url, token=token, timeout_s=2.0)
        self._page: dict[str, object] = {}

    async def refresh(self) -> None:
        try:
            self._page = (await self._service.request("GET", "/v1/status")).json()
        except AgentRLError:
            return

    @property
    def phase(self) -> str:
        return str(self._page.get("phase", ""))

    @property
    def waiting_for(self) -> str:
        return str(self._page.get("waiting_for", ""))

    def evaluated(self, label: str) -> int:
        """Tasks of an evaluation that have a result."""
        return self._count(f"evaluations/{label}")

    def episodes(self, state: str) -> int:
        """Training episodes in a state."""
        return self._count(f"episodes/{state}")

    def _count(self, name: str) -> int:
        value = self._page.get(name, 0)
        return value if isinstance(value, int) else 0

    async def close(self) -> None:
        await self._service.close()
