"""The error tree and its envelope."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import AgentRLError, Blame, CapacityError, Ran, SandboxLost, error_classes, from_envelope

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.sampled_from(sorted(error_classes())),
    st.text(),
    st.sampled_from(Blame),
    st.sampled_from(Ran),
    st.booleans(),
    st.dictionaries(st.text(), json_values, max_size=3),
)
def test_every_error_survives_the_wire(
    code: str, message: str, blame: Blame, ran: Ran, retryable: bool, detail: dict[str, object]
) -> None:
    sent = error_classes()[code](message, blame=blame, ran=ran, retryable=retryable, detail=detail)
    got = from_envelope(json.loads(json.dumps(sent.envelope())), "lost")
    assert type(got) is type(sent)
    assert (got.message, got.blame, got.ran, got.retryable, got.detail) == (message, blame, ran, retryable, detail)


def test_codes_are_unique_and_found_by_their_branch() -> None:
    assert error_classes()["SANDBOX_LOST"] is SandboxLost

    class Nearer(SandboxLost):
        """Of one module, which tells it from others of that code."""

    assert error_classes()["SANDBOX_LOST"] is SandboxLost

    def tree(cls: type[AgentRLError]) -> list[type[AgentRLError]]:
        return [cls, *(found for sub in cls.__subclasses__() for found in tree(sub))]

    ours = [cls for cls in tree(AgentRLError) if cls.__module__ == "agentrl.core.errors"]
    assert len({cls.code for cls in ours}) == len(ours)


@pytest.mark.parametrize("body", [{}, {"detail": "Not Found"}, {"error": "text"}, {"error": {"message": "m"}}])
def test_what_is_no_envelope_becomes_the_fallback(body: dict[str, object]) -> None:
    error = from_envelope(body, "GET /x: HTTP 502")
    assert (type(error), error.message, error.blame) == (AgentRLError, "GET /x: HTTP 502", Blame.INFRA)


def test_a_code_from_the_future_is_an_infra_error() -> None:
    error = from_envelope({"error": {"code": "NOT_YET_KNOWN", "message": "m"}}, "fallback")
    assert (type(error), error.message, error.blame) == (AgentRLError, "m", Blame.INFRA)


def test_capacity_says_when_to_come_back() -> None:
    assert from_envelope(CapacityError("full", detail={"retry_after_s": 7}).envelope(), "").detail == {
        "retry_after_s": 7
    }
    assert CapacityError("full", detail={"retry_after_s": 7}).retry_after_s == 7.0
    assert CapacityError("full").retryable
