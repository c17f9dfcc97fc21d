"""What is accepted, and under which reason everything else is quarantined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import Blame
from agentrl.core.types import Episode, Failed, Provenance, Scored, Trajectory
from agentrl.rollout.acceptance import Defect, judge
from agentrl.rollout.tables import EpisodeState
from agentrl.testing.episodes import scripted_episode

EPISODE = scripted_episode("e", group_id="g")
PATH = EPISODE.trajectories[0]
TRAINED = PATH.loss_mask.index(1)


def _with(**changes: Any) -> Episode:
    """The episode with its trajectory changed behind the validators' back, as a broken client might."""
    broken = Trajectory.model_construct(**{**dict(PATH), **changes})
    return EPISODE.model_copy(update={"trajectories": (broken,)})


def _put(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    return (*values[:TRAINED], value, *values[TRAINED + 1 :])


def test_a_consistent_scored_episode_is_accepted() -> None:
    assert judge(EPISODE).state is EpisodeState.ACCEPTED


def test_a_reward_of_zero_is_accepted() -> None:
    zero = EPISODE.model_copy(update={"outcome": Scored(reward=0.0, verifier="1")})
    assert judge(zero).state is EpisodeState.ACCEPTED


@pytest.mark.parametrize("blame", list(Blame))
def test_a_failure_is_failed_with_its_code(blame: Blame) -> None:
    verdict = judge(EPISODE.model_copy(update={"outcome": Failed(code="REWARD", blame=blame)}))
    assert (verdict.state, verdict.reason) == (EpisodeState.FAILED, "REWARD")


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"loss_mask": PATH.loss_mask[:-1]}, Defect.ARRAYS_DISAGREE),
        ({"behavior_logprobs": (*PATH.behavior_logprobs, None)}, Defect.ARRAYS_DISAGREE),
        ({"token_ids": ()}, Defect.ARRAYS_DISAGREE),
        ({"loss_mask": _put(PATH.loss_mask, 2)}, Defect.BAD_MASK),
        ({"behavior_logprobs": _put(PATH.behavior_logprobs, None)}, Defect.UNSAMPLED_TRAINED),
        ({"behavior_logprobs": _put(PATH.behavior_logprobs, math.nan)}, Defect.UNSAMPLED_TRAINED),
        ({"behavior_logprobs": _put(PATH.behavior_logprobs, -math.inf)}, Defect.UNSAMPLED_TRAINED),
        ({"behavior_logprobs": _put(PATH.behavior_logprobs, 0.5)}, Defect.UNSAMPLED_TRAINED),
        ({"policy_versions": _put(PATH.policy_versions, None)}, Defect.UNSAMPLED_TRAINED),
        ({"policy_versions": _put(PATH.policy_versions, -1)}, Defect.UNSAMPLED_TRAINED),
        ({"loss_mask": (0,) * len(PATH.loss_mask)}, Defect.NO_TRAINED_TOKEN),
        ({"session_id": "another"}, Defect.WRONG_SESSION),
        ({"session_tokens": 1}, Defect.SESSION_TOKENS),
        ({"provenance": None}, Defect.NO_PROVENANCE),
        ({"provenance": PATH.provenance.model_copy(update={"tokenizer": ""})}, Defect.NO_PROVENANCE),
        ({"provenance": PATH.provenance.model_copy(update={"renderer": ""})}, Defect.NO_PROVENANCE),
        ({"provenance": PATH.provenance.model_copy(update={"engine": ""})}, Defect.NO_PROVENANCE),
    ],
)
def test_a_broken_trajectory_is_quarantined(changes: Mapping[str, Any], defect: Defect) -> None:
    verdict = judge(_with(**changes))
    assert (verdict.state, verdict.reason) == (EpisodeState.QUARANTINED, defect)
    assert verdict.detail


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"trajectories": ()}, Defect.NO_TRAJECTORY),
        ({"trajectories": (PATH, PATH)}, Defect.DUPLICATE_TRAJECTORY),
        ({"env_version": ""}, Defect.NO_VERSION),
        ({"outcome": Scored(reward=1.0)}, Defect.NO_VERSION),
        ({"outcome": Scored.model_construct(reward=math.nan, parts={}, verifier="1")}, Defect.BAD_REWARD),
    ],
)
def test_a_broken_episode_is_quarantined(changes: Mapping[str, Any], defect: Defect) -> None:
    verdict = judge(EPISODE.model_copy(update=changes))
    assert (verdict.state, verdict.reason) == (EpisodeState.QUARANTINED, defect)


def test_an_export_that_does_not_parse_is_quarantined_with_the_reason() -> None:
    verdict = judge(EPISODE.model_copy(update={"trajectories": ()}), "token_ids: not a list")
    assert (verdict.reason, verdict.detail) == (Defect.UNREADABLE, "token_ids: not a list")


def test_one_broken_trajectory_of_two_is_enough() -> None:
    other = PATH.model_copy(update={"id": "other", "provenance": Provenance.model_construct(engine="")})
    broken = other.model_copy(update={"loss_mask": ()})
    assert judge(EPISODE.model_copy(update={"trajectories": (PATH, broken)})).reason == Defect.ARRAYS_DISAGREE


@given(
    mask=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    logprobs=st.lists(st.none() | st.floats(-20, 0), min_size=1, max_size=12),
    versions=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=12),
)
def test_whatever_is_accepted_satisfies_the_types(
    mask: list[int], logprobs: list[float | None], versions: list[int | None]
) -> None:
    """The check on raw values lets nothing through that the wire type would refuse."""
    changed = {
        "token_ids": tuple(range(len(mask))), "loss_mask": tuple(mask), "behavior_logprobs": tuple(logprobs),
        "policy_versions": tuple(versions), "session_tokens": sum(mask),
    }  # fmt: skip
    episode = _with(**changed)
    if judge(episode).state is EpisodeState.ACCEPTED:
        assert Trajectory.model_validate({**dict(PATH), **changed}).loss_mask == tuple(mask)
        assert any(mask)
