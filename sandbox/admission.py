"""Who may have another sandbox: capacity, quotas and weighted fair shares as a pure object. Used by `controller`.

Nobody waits here: whoever is refused is told at once when to ask again, and is remembered for as long. Invariant:
while tenants are refused, a place that becomes free goes to the one with the least sandboxes for its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.core.config import TenantConfig
from agentrl.core.errors import CapacityError

RETRY_S = 1.0
"""When to ask again."""
REMEMBERED_S = 3 * RETRY_S
"""How long a refused request counts as waiting."""
DEFAULT = "default"
"""Tenant whose settings are those of every tenant without its own."""


def tenant_of(owner: str) -> str:
    """`team/run` belongs to `team`; an owner without a slash is a tenant itself."""
    return owner.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Refused:
    tenant: str
    count: int
    until: float


class Admission:
    def __init__(self, capacity: int, tenants: Mapping[str, TenantConfig]) -> None:
        self._capacity, self._tenants = capacity, tenants
        self._refused: dict[tuple[str, str], Refused] = {}
        """Requests that wait, by owner and key."""

    def settings(self, tenant: str) -> TenantConfig:
        return self._tenants.get(tenant) or self._tenants.get(DEFAULT) or TenantConfig()

    def admit(self, owner: str, key: str, count: int, live: Mapping[str, int], *, now: float) -> None:
        """Returns when `count` more may be made for `owner`. `live` counts by tenant. CapacityError otherwise."""
        tenant, total = tenant_of(owner), sum(live.values())
        quota = self.settings(tenant).quota
        if quota and live.get(tenant, 0) + count > quota:
            raise _capacity(f"tenant {tenant} has {live.get(tenant, 0)} of its quota of {quota} sandboxes", count)
        self._refused = {at: waiting for at, waiting in self._refused.items() if waiting.until > now}
        self._refused.pop((owner, key), None)
        free = self._capacity - total
        reserved = sum(w.count for w in self._refused.values() if self._before(w, tenant, count, live))
        if count > free - reserved:
            self._refused[owner, key] = Refused(tenant, count, now + REMEMBERED_S)
            kept = f", {min(free, reserved)} of the free ones kept for tenants with less" if free >= count else ""
            raise _capacity(f"{total} of {self._capacity} sandboxes are live{kept}", count)

    def _before(self, waiting: Refused, tenant: str, count: int, live: Mapping[str, int]) -> bool:
        """Whether a waiting request goes before `count` more of `tenant`."""
        theirs = (live.get(waiting.tenant, 0) + waiting.count) / self.settings(waiting.tenant).weight
        ours = (live.get(tenant, 0) + count) / self.settings(tenant).weight
        return waiting.tenant != tenant and theirs < ours


def _capacity(why: str, count: int) -> CapacityError:
    asked = "another" if count == 1 else f"{count} more"
    return CapacityError(f"no room for {asked}: {why}; ask again in {RETRY_S:.0f} s", detail={"retry_after_s": RETRY_S})
