"""Capacity, quotas and fair shares."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.config import TenantConfig
from agentrl.core.errors import CapacityError
from sandbox.admission import REMEMBERED_S, Admission


def test_beyond_capacity_and_quota_is_refused_at_once() -> None:
    admission = Admission(4, {"a": TenantConfig(quota=2), "default": TenantConfig(quota=3)})
    admission.admit("a/run-1", "k", 2, {}, now=0.0)
    with pytest.raises(CapacityError, match="its quota of 2") as refused:
        admission.admit("a/run-2", "k", 1, {"a": 2}, now=0.0)
    assert refused.value.retry_after_s == 1.0
    with pytest.raises(CapacityError, match="its quota of 3"):
        admission.admit("b", "k", 4, {}, now=0.0)
    with pytest.raises(CapacityError, match="3 of 4 sandboxes are live"):
        admission.admit("b", "k", 2, {"a": 2, "b": 1}, now=0.0)
    admission.admit("b", "k", 1, {"a": 2, "b": 1}, now=0.0)


def test_a_free_place_goes_to_who_has_less_and_waits() -> None:
    admission = Admission(4, {})
    with pytest.raises(CapacityError):
        admission.admit("small", "k", 1, {"big": 4}, now=0.0)
    with pytest.raises(CapacityError, match="kept for tenants with less"):
        admission.admit("big", "k", 1, {"big": 3}, now=1.0)
    admission.admit("small", "k", 1, {"big": 3}, now=1.0)
    admission.admit("big", "k", 1, {"big": 2, "small": 1}, now=1.0)


def test_who_does_not_come_back_keeps_no_place() -> None:
    admission = Admission(4, {})
    with pytest.raises(CapacityError):
        admission.admit("small", "k", 1, {"big": 4}, now=0.0)
    admission.admit("big", "k", 1, {"big": 3}, now=REMEMBERED_S)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), st.integers(1, 4))
def test_shares_become_those_of_the_weights(first: list[str], weight: int) -> None:
    """Both always want more; the oldest sandbox ends each second."""
    admission = Admission(20, {"a": TenantConfig(weight=weight)})
    live = [first[i % len(first)] for i in range(20)]
    for second in range(100):
        live.pop(0)
        for tenant in "ab":
            try:
                admission.admit(tenant, f"{tenant}-next", 1, Counter(live), now=float(second))
            except CapacityError:
                continue
            live.append(tenant)
        assert len(live) <= 20
    assert len(live) >= 19
    assert abs(live.count("a") - 20 * weight / (weight + 1)) <= 2
