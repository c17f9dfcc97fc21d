"""A transcript holds everything a reader asks for, and no content can break its layout."""

from __future__ import annotations

from agentrl.core.types import (
    Attempt,
    Episode,
    Failed,
    Message,
    Outcome,
    Provenance,
    Sampling,
    Scored,
    Stop,
    Task,
    Timings,
    ToolCall,
    Trajectory,
)
from agentrl.observe.transcript import transcript


def episode(outcome: Outcome, *messages: Message) -> Episode:
    path = Trajectory(
        id="t", session_id="s", token_ids=(1, 2, 3), loss_mask=(0, 1, 1), behavior_logprobs=(None, -0.1, -0.2),
        policy_versions=(None, 4, 5), finish="terminated", session_tokens=2,
        provenance=Provenance(tokenizer="t", renderer="r", engine="e", sampling=Sampling()),
    )  # fmt: skip
    return Episode(
        id="ep-1", group_id="g", index=0, task=Task(env="vault", id="train-0-7", source="vault"), env_version="1",
        session_id="s", sandbox_id="box-1", trajectories=(path,), outcome=outcome, timings=Timings(total_s=1.5),
        attempt=Attempt(stop=Stop.DONE, turns=1, transcript=messages),
    )  # fmt: skip


def test_facts_and_conversation_are_there() -> None:
    call = ToolCall(id="c", name="bash", arguments={"command": "cat alpha"}, raw="{}")
    page = transcript(
        episode(
            Scored(reward=1.0, parts={"submitted": 1.0}, verifier="vault/1"),
            Message(role="user", content="Find the code."),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="otter", tool_call_id="c"),
        )
    )
    for expected in ("ep-1", "reward 1 (submitted 1)", "train-0-7", "box-1", "4, 5", "| Sampled tokens | 2 |"):
        assert expected in page
    assert "## Model (turn 1)\n\n```call bash\ncat alpha\n```" in page
    assert "## Tool\n\n```\notter\n```" in page


def test_a_failure_is_shown_as_one_and_not_as_a_reward() -> None:
    page = transcript(episode(Failed(code="SANDBOX_LOST", detail="node went | away")))
    assert "failed: SANDBOX_LOST (blame infra): node went \\| away" in page
    assert "| Result | reward" not in page


def test_backticks_in_content_cannot_close_the_fence() -> None:
    page = transcript(episode(Scored(reward=0.0), Message(role="tool", content="```\n# not a heading\n````")))
    assert "`````\n```\n# not a heading\n````\n`````" in page


def test_a_malformed_call_is_shown_as_the_model_wrote_it() -> None:
    call = ToolCall(id="c", name="bash", arguments=None, raw='{"command": "ls')
    page = transcript(episode(Scored(reward=0.0), Message(role="assistant", tool_calls=(call,))))
    assert '```call bash\n{"command": "ls\n```' in page
