"""The reward service and its client over HTTP: an error is not a zero, whatever the error."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Response
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.config import RewardConfig
from agentrl.core.environment import Environment, Split
from agentrl.core.errors import (
    Blame,
    ContextOverflow,
    NotFound,
    Ran,
    RequestError,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    Unauthorized,
    error_classes,
)
from agentrl.core.http import Service, error_response, free_port, server, serving
from agentrl.core.protocols import Sandbox
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Attempt, Failed, Message, SandboxView, Scored, ScoreRequest, Stop, Task
from agentrl.reward.client import RewardClient
from agentrl.reward.metrics import SPECS
from agentrl.reward.scorer import Scorer
from agentrl.reward.service import create_reward_app

Score = Callable[[], Awaitable[Any]]


class Verifier(Environment):
    """Scores with whatever it is given."""

    name = "verifier"
    version = "7"

    def __init__(self, score: Score) -> None:
        self.calls = 0
        self._score = score

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(env=self.name, id="0", source=self.name)

    def messages(self, task: Task) -> Sequence[Message]:
        return ()

    async def score(self, task: Task, attempt: Attempt, sandbox: Sandbox | None) -> Scored | Failed:
        self.calls += 1
        return await self._score()  # type: ignore[no-any-return]


class Gone:
    """A controller whose sandboxes are all gone, for the given reason."""

    def __init__(self, reason: Exception | None = None) -> None:
        self.reason = reason or NotFound("no such sandbox")

    def acquire(self, spec: object, *, owner: str, key: str) -> Any:
        raise self.reason

    async def get(self, sandbox_id: str) -> Sandbox:
        raise self.reason

    async def list(self, *, owner: str | None = None, live: bool = True) -> Sequence[SandboxView]:
        return ()


def returning(value: Any) -> Score:
    async def score() -> Any:
        return value

    return score


def raising(error: BaseException) -> Score:
    async def score() -> Any:
        raise error

    return score


def asked(episode_id: str = "e1", **changes: Any) -> ScoreRequest:
    task = Task(env=changes.pop("env", "verifier"), id="0", source="verifier")
    attempt = Attempt(stop=Stop.DONE, turns=changes.pop("turns", 1), transcript=())
    return ScoreRequest(
        episode_id=episode_id, task=task, attempt=attempt, sandbox_id=changes.pop("sandbox_id", None), **changes
    )


@asynccontextmanager
async def service(
    score: Score, reason: Exception | None = None, **config: Any
) -> AsyncIterator[tuple[RewardClient, Verifier]]:
    verifier = Verifier(score)
    app = create_reward_app({"verifier": verifier}, Gone(reason), RewardConfig(**config), token="t")
    async with serving(app) as url:
        client = RewardClient(url, token="t")
        yield client, verifier
        await client.close()


async def test_a_zero_is_scored_and_names_its_verifier() -> None:
    async with service(returning(Scored(reward=0.0, parts={"tests": 0.5}))) as (client, _):
        assert await client.score(asked()) == Scored(reward=0.0, parts={"tests": 0.5}, verifier="verifier@7")


async def test_a_verifier_that_names_its_own_version_keeps_it() -> None:
    async with service(returning(Scored(reward=1.0, verifier="judge-3"))) as (client, _):
        assert (await client.score(asked())).verifier == "judge-3"


async def test_a_failure_that_the_environment_returns_is_passed_on() -> None:
    crashed = Failed(code="PATCH_BROKEN", blame=Blame.AGENT, ran=Ran.YES, detail="patch does not apply")
    async with service(returning(crashed)) as (client, _):
        assert await client.score(asked()) == crashed.model_copy(update={"verifier": "verifier@7"})


@pytest.mark.parametrize(
    ("score", "code"),
    [
        (raising(ValueError("bad")), "SCORER_CRASHED"),
        (raising(AssertionError()), "SCORER_CRASHED"),
        (raising(TimeoutError("the verifier's own")), "SCORER_CRASHED"),
        (raising(asyncio.CancelledError()), "SCORER_CRASHED"),
        (raising(SystemExit(0)), "SCORER_CRASHED"),
        (raising(KeyboardInterrupt()), "SCORER_CRASHED"),
        (raising(SandboxFileError("no answer.txt")), "SANDBOX_FILE"),
        (raising(SandboxError("exec failed")), "SANDBOX"),
        (returning(0.0), "SCORER_CRASHED"),
        (returning(None), "SCORER_CRASHED"),
        (returning(Scored.model_construct(reward=float("nan"), parts={})), "REWARD_NOT_FINITE"),
        (returning(Scored.model_construct(reward=float("-inf"), parts={})), "REWARD_NOT_FINITE"),
        (returning(Scored(reward=1.0, parts={"style": float("nan")})), "REWARD_NOT_FINITE"),
        (returning(Scored.model_construct(reward="0", parts={})), "SCORER_CRASHED"),
    ],
)
async def test_what_goes_wrong_while_scoring_is_an_infra_failure(score: Score, code: str) -> None:
    async with service(score) as (client, _):
        outcome = await client.score(asked())
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame, outcome.verifier) == (code, Blame.INFRA, "verifier@7")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raisable() -> list[type[BaseException]]:
    found = [cls for cls in vars(builtins).values() if isinstance(cls, type) and issubclass(cls, BaseException)]
    several = {UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup, ExceptionGroup}
    return [cls for cls in found if cls not in several] + [*error_classes().values(), asyncio.CancelledError, Mute]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(raisable()), st.text(st.characters(), max_size=20))
def test_no_exception_becomes_a_score(cls: type[BaseException], text: str) -> None:
    async def outcome() -> Failed | Scored:
        scorer = Scorer({"verifier": Verifier(raising(cls(text)))}, Gone(), RewardConfig())
        return await scorer.score(asked())

    failed = asyncio.run(outcome())
    assert isinstance(failed, Failed)
    assert failed.blame is Blame.INFRA
    assert Failed.model_validate_json(failed.model_dump_json()) == failed


@pytest.mark.parametrize(
    ("reason", "code"), [(SandboxLost("node died"), "SANDBOX_LOST"), (NotFound("expired"), "NOT_FOUND")]
)
async def test_a_sandbox_that_is_gone_is_an_infra_failure(reason: Exception, code: str) -> None:
    async with service(returning(Scored(reward=1.0)), reason) as (client, verifier):
        outcome = await client.score(asked(sandbox_id="s1"))
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame, verifier.calls) == (code, Blame.INFRA, 0)


async def test_an_environment_that_is_not_served_is_the_callers_mistake() -> None:
    async with service(returning(Scored(reward=1.0))) as (client, _):
        outcome = await client.score(asked(env="other"))
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame, outcome.ran) == ("UNKNOWN_ENV", Blame.CALLER, Ran.NO)


async def forever() -> Any:
    await asyncio.Event().wait()


async def stubborn() -> Any:
    """Ignores its cancellation once, as a verifier with a bare `except` does."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.5)
    return Scored(reward=1.0)


@pytest.mark.parametrize("score", [forever, stubborn])
async def test_a_scorer_that_hangs_is_timed_out_and_gives_back_its_slot(score: Score) -> None:
    async with service(score, timeout_s=0.05, concurrency=1) as (client, verifier):
        outcomes = [await client.score(asked(f"e{i}")) for i in range(3)]
    assert [o.code for o in outcomes if isinstance(o, Failed)] == ["SCORER_TIMEOUT"] * 3
    assert verifier.calls == 3


async def test_no_more_than_concurrency_are_scored_at_once() -> None:
    running = most = 0

    async def score() -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Scored(reward=1.0)

    async with service(score, concurrency=2) as (client, _):
        outcomes = await asyncio.gather(*[client.score(asked(f"e{i}")) for i in range(7)])
    assert most == 2
    assert all(isinstance(o, Scored) for o in outcomes)


async def test_requests_for_one_episode_are_scored_once() -> None:
    async def score() -> Any:
        await asyncio.sleep(0.02)
        return Scored(reward=1.0)

    async with service(score) as (client, verifier):
        together = await asyncio.gather(*[client.score(asked(deadline_s=10.0 + i)) for i in range(5)])
        later = await client.score(asked())
    assert {o.model_dump_json() for o in (*together, later)} == {later.model_dump_json()}
    assert verifier.calls == 1


async def test_another_question_under_the_same_episode_is_refused() -> None:
    async with service(returning(Scored(reward=1.0))) as (client, _):
        assert isinstance(await client.score(asked()), Scored)
        other = await client.score(asked(turns=2))
    assert isinstance(other, Failed)
    assert (other.code, other.blame) == ("CONFLICT", Blame.CALLER)


async def test_a_failure_that_may_pass_is_not_remembered() -> None:
    answers: list[Any] = [SandboxError("busy", retryable=True), Scored(reward=1.0)]

    async def score() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with service(score) as (client, _):
        assert isinstance(await client.score(asked()), Failed)
        assert isinstance(await client.score(asked()), Scored)


async def test_outcomes_are_counted_by_code() -> None:
    metrics = Metrics(SPECS)
    environments = {"verifier": Verifier(raising(ValueError()))}
    async with serving(create_reward_app(environments, Gone(), RewardConfig(), metrics=metrics)) as url:
        client = RewardClient(url)
        await asyncio.gather(*[client.score(asked(f"e{i}")) for i in range(3)])
        await client.close()
    assert metrics.value("reward/outcomes_total", kind="failed", code="SCORER_CRASHED", env="verifier") == 3
    assert metrics.value("reward/running_count") == 0


async def test_what_is_no_score_request_is_refused() -> None:
    async with service(returning(Scored(reward=1.0))) as (client, _):
        plain = Service(client.base_url, token="t")
        with pytest.raises(RequestError, match="episode_id"):
            await plain.request("POST", "/v1/score", json={"reward": 1})
        await plain.close()
        stranger = Service(client.base_url, token="other")
        with pytest.raises(Unauthorized):
            await stranger.request("POST", "/v1/score", json=asked())
        await stranger.close()


async def test_the_client_waits_for_a_service_that_restarts() -> None:
    port = free_port()
    client = RewardClient(f"http://127.0.0.1:{port}")
    waiting = asyncio.create_task(client.score(asked()))
    await asyncio.sleep(0.2)
    app = create_reward_app({"verifier": Verifier(returning(Scored(reward=0.25)))}, Gone(), RewardConfig())
    run = server(app, port=port)
    serving_task = asyncio.create_task(run.serve())
    outcome = await waiting
    run.should_exit = True
    await serving_task
    await client.close()
    assert isinstance(outcome, Scored)
    assert outcome.reward == 0.25


async def test_a_service_that_stays_away_is_a_failure_by_the_deadline() -> None:
    client = RewardClient(f"http://127.0.0.1:{free_port()}")
    outcome = await client.score(asked(deadline_s=0.3))
    await client.close()
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame, outcome.ran, outcome.retryable) == ("UNAVAILABLE", Blame.INFRA, Ran.NO, True)


async def test_an_error_of_the_call_is_never_blamed_on_the_agent() -> None:
    app = FastAPI()

    @app.post("/v1/score")
    async def other_service() -> Response:
        return error_response(ContextOverflow("not a reward service"))

    async with serving(app) as url:
        client = RewardClient(url)
        outcome = await client.score(asked())
        await client.close()
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == ("CONTEXT_OVERFLOW", Blame.INFRA)


@pytest.mark.parametrize(
    "answer", [b"0.0", b"{}", b'{"kind": "scored"}', b'{"kind": "scored", "reward": NaN}', b"<html>"]
)
async def test_an_answer_that_is_no_outcome_is_an_infra_failure(answer: bytes) -> None:
    app = FastAPI()

    @app.post("/v1/score")
    async def other_service() -> Response:
        return Response(answer)

    async with serving(app) as url:
        client = RewardClient(url)
        outcome = await client.score(asked())
        await client.close()
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == ("REWARD", Blame.INFRA)


async def test_a_request_that_cannot_be_sent_is_a_failure() -> None:
    async with service(returning(Scored(reward=1.0))) as (client, _):
        request = asked()
        unsendable = Attempt(stop=Stop.DONE, turns=1, transcript=(Message(role="user", content="\ud800"),))
        outcome = await client.score(request.model_copy(update={"attempt": unsendable}))
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.blame) == ("REWARD", Blame.INFRA)
