"""Decides whether a finished episode may train: accepted, failed, or quarantined with a typed reason.

Called by the producer for every episode and by the audit for every stored one. Pure. Invariant: it checks
the promises on the values themselves and trusts no earlier validation; it never repairs or fills in a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from agentrl.core.types import Episode, Failed, Trajectory
from agentrl.rollout.tables import EpisodeState


class Defect(StrEnum):
    """Why a record cannot be trusted."""

    UNREADABLE = "unreadable"
    """The gateway's export does not parse."""
    NO_TRAJECTORY = "no_trajectory"
    NO_TRAINED_TOKEN = "no_trained_token"
    ARRAYS_DISAGREE = "arrays_disagree"
    BAD_MASK = "bad_mask"
    """A mask value is neither 0 nor 1."""
    UNSAMPLED_TRAINED = "unsampled_trained"
    """A token is trained without a version, or without a finite logprob of at most 0."""
    WRONG_SESSION = "wrong_session"
    SESSION_TOKENS = "session_tokens"
    """The session claims fewer trained tokens than its trajectories hold."""
    DUPLICATE_TRAJECTORY = "duplicate_trajectory"
    NO_PROVENANCE = "no_provenance"
    NO_VERSION = "no_version"
    """The environment's or the verifier's version is missing."""
    BAD_REWARD = "bad_reward"


@dataclass(frozen=True, slots=True)
class Verdict:
    state: EpisodeState
    reason: str = ""
    """A failure's code, or a `Defect`."""
    detail: str = ""


def judge(episode: Episode, unreadable: str = "") -> Verdict:
    """The state an episode ends in; `unreadable` says why its trajectories could not be read."""
    if isinstance(episode.outcome, Failed):
        return Verdict(EpisodeState.FAILED, episode.outcome.code, episode.outcome.detail)
    if unreadable:
        return Verdict(EpisodeState.QUARANTINED, Defect.UNREADABLE, unreadable)
    found = next(_defects(episode), None)
    if found is None:
        return Verdict(EpisodeState.ACCEPTED)
    return Verdict(EpisodeState.QUARANTINED, *found)


def trained_tokens(trajectory: Trajectory) -> int:
    return sum(trajectory.loss_mask)


def _defects(episode: Episode) -> Iterator[tuple[Defect, str]]:
    if not isinstance(episode.outcome, Failed):
        if not math.isfinite(episode.outcome.reward):
            yield Defect.BAD_REWARD, f"reward is {episode.outcome.reward}"
        if not (episode.env_version and episode.outcome.verifier):
            versions = f"environment {episode.env_version!r}, verifier {episode.outcome.verifier!r}"
            yield Defect.NO_VERSION, versions
    if not episode.trajectories:
        yield Defect.NO_TRAJECTORY, f"session {episode.session_id} exported no trajectory"
    for trajectory in episode.trajectories:
        for defect, detail in _trajectory_defects(trajectory, episode.session_id):
            yield defect, f"trajectory {trajectory.id}: {detail}"
    if len({trajectory.id for trajectory in episode.trajectories}) < len(episode.trajectories):
        yield Defect.DUPLICATE_TRAJECTORY, f"session {episode.session_id} exported one id twice"
    trained = sum(trained_tokens(trajectory) for trajectory in episode.trajectories)
    if trained == 0:
        why = "nothing was sampled, or all of it under a response_format"
        yield Defect.NO_TRAINED_TOKEN, f"session {episode.session_id} holds no token to train on: {why}"
    for trajectory in episode.trajectories:
        if trajectory.session_tokens < trained:
            detail = f"session_tokens is {trajectory.session_tokens}, the trajectories hold {trained}"
            yield Defect.SESSION_TOKENS, f"trajectory {trajectory.id}: {detail}"


def _trajectory_defects(trajectory: Trajectory, session_id: str) -> Iterator[tuple[Defect, str]]:
    ids, mask = trajectory.token_ids, trajectory.loss_mask
    logprobs, versions = trajectory.behavior_logprobs, trajectory.policy_versions
    if not len(ids) == len(mask) == len(logprobs) == len(versions):
        yield Defect.ARRAYS_DISAGREE, f"lengths {len(ids)}, {len(mask)}, {len(logprobs)}, {len(versions)}"
        return
    if trajectory.session_id != session_id:
        yield Defect.WRONG_SESSION, f"belongs to session {trajectory.session_id}, the episode's is {session_id}"
    provenance = trajectory.provenance
    if not (provenance and provenance.tokenizer and provenance.renderer and provenance.engine):
        yield Defect.NO_PROVENANCE, f"{provenance!r}"
    for at, (bit, logprob, version) in enumerate(zip(mask, logprobs, versions, strict=True)):
        if bit not in (0, 1):
            yield Defect.BAD_MASK, f"token {at} has mask {bit}"
        if bit and not _sampled(logprob, version):
            yield Defect.UNSAMPLED_TRAINED, f"token {at} has logprob {logprob}, version {version}"


def _sampled(logprob: float | None, version: int | None) -> bool:
    # Engines round: a certain token's logprob may come back a hair above 0.
    return logprob is not None and version is not None and version >= 0 and -math.inf < logprob <= 1e-4
