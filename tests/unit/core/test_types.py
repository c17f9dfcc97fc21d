"""A value that exists is consistent, and survives the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.core.errors import Blame, SandboxFileError
from agentrl.core.types import (
    Completion,
    ExecRequest,
    ExecResult,
    Failed,
    Outcome,
    Provenance,
    Sampling,
    SandboxSpec,
    Scored,
    ToolCall,
    Trajectory,
    VersionRun,
)

OUTCOME: TypeAdapter[Scored | Failed] = TypeAdapter(Outcome)


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": "t", "session_id": "s", "token_ids": (1, 2, 3), "loss_mask": (0, 1, 1),
        "behavior_logprobs": (None, -0.5, -0.25), "policy_versions": (None, 3, 4), "finish": "terminated",
        "session_tokens": 2,
        "provenance": Provenance(tokenizer="a", renderer="b", engine="c", sampling=Sampling()),
    }  # fmt: skip
    return Trajectory(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": (1, 2)}, "lengths"),
        ({"behavior_logprobs": (None, -0.5)}, "lengths"),
        ({"loss_mask": (0, 2, 1)}, "loss mask at 1 is 2"),
        ({"behavior_logprobs": (None, None, -0.25)}, "token 1 is trained but has logprob None"),
        ({"behavior_logprobs": (None, -0.5, float("nan"))}, "token 2 is trained but has logprob nan"),
        ({"behavior_logprobs": (None, -0.5, float("-inf"))}, "token 2 is trained but has logprob -inf"),
        ({"policy_versions": (None, 3, None)}, "version None"),
    ],
)
def test_a_trajectory_that_could_not_be_trained_on_does_not_exist(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        trajectory(**changes)


def test_a_trajectory_survives_the_wire() -> None:
    sent = trajectory()
    assert Trajectory.model_validate_json(sent.model_dump_json()) == sent


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 12))
def test_version_runs_cover_a_completion_without_gaps(lengths: list[int], tokens: int) -> None:
    runs, at = [], 0
    for version, length in enumerate(lengths):
        runs.append(VersionRun(version=version, start=at, end=at + length))
        at += length

    def build() -> Completion:
        return Completion(
            token_ids=(7,) * tokens,
            logprobs=(-1.0,) * tokens,
            finish_reason="stop",
            versions=tuple(runs),
            prompt_tokens=1,
        )

    if at == tokens:
        assert Completion.model_validate_json(build().model_dump_json()) == build()
    else:
        with pytest.raises(ValidationError, match=f"cover {at} of {tokens}"):
            build()


def test_a_gap_between_version_runs_is_refused() -> None:
    runs = (VersionRun(version=0, start=0, end=1), VersionRun(version=1, start=2, end=3))
    with pytest.raises(ValidationError, match="gap or overlap at token 1"):
        Completion(token_ids=(1, 2, 3), logprobs=(0.0, 0.0, 0.0), finish_reason="stop", versions=runs, prompt_tokens=1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), None])
def test_a_score_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(ValidationError):
        Scored(reward=reward)


def test_a_zero_and_a_failure_are_told_apart_on_the_wire() -> None:
    zero, failed = Scored(reward=0.0), Failed.of(SandboxFileError("no answer.txt"))
    assert OUTCOME.validate_json(zero.model_dump_json()) == zero
    assert OUTCOME.validate_json(failed.model_dump_json()) == failed
    assert (failed.code, failed.blame) == ("SANDBOX_FILE", Blame.AGENT)
    assert Failed(code="X").blame is Blame.INFRA, "unknown means infra"
    with pytest.raises(ValidationError):
        OUTCOME.validate_json('{"reward": 0.0}')


@given(stdout=st.binary(max_size=40), stdin=st.binary(max_size=40))
def test_bytes_survive_the_wire(stdout: bytes, stdin: bytes) -> None:
    result = ExecResult(status="EXITED", exit_code=0, stdout=stdout)
    request = ExecRequest(argv=("cat",), stdin=stdin)
    assert ExecResult.model_validate_json(result.model_dump_json()) == result
    assert ExecRequest.model_validate_json(request.model_dump_json()) == request


def test_values_are_frozen_and_refuse_unknown_fields() -> None:
    spec = SandboxSpec()
    with pytest.raises(ValidationError, match="frozen"):
        spec.workdir = "/tmp"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        SandboxSpec.model_validate({"work_dir": "/tmp"})


def test_a_written_call_holds_its_arguments_as_a_model_would_have_sent_them() -> None:
    call = ToolCall.of("bash", {"command": "ls"})
    assert (call.arguments, call.raw) == ({"command": "ls"}, '{"command": "ls"}')
