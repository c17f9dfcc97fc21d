"""Whatever is batched, cached, recomputed or updated: a token's logprob is that of a plain forward."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, VOCAB, logprobs, tiny_model, token_logprobs
from transformers import PreTrainedModel

from agentrl.engine import scheduler as scheduler_module
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence

TOLERANCE = 1e-4
"""Of logprobs in float32, whose sums come out by some 1e-5 otherwise in a batch of another shape."""
MakeScheduler = Callable[..., tuple[Scheduler, PreTrainedModel]]


def call(name: str, prompt: Many[int], max_new: int = 8, **options: Any) -> Sequence:
    return Sequence(id=name, prompt=list(prompt), max_new=max_new, **options)


def run(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    ended: list[Sequence] = []
    while not scheduler.idle:
        ended += scheduler.step()
    assert {s.id for s in ended} == {s.id for s in sequences}
    assert len(ended) == len(sequences)


def assert_exact(sequence: Sequence, model: PreTrainedModel) -> None:
    expected = token_logprobs(model, sequence.prompt + sequence.token_ids)[len(sequence.prompt) - 1 :]
    assert sequence.logprobs == pytest.approx(expected, abs=TOLERANCE)


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_ragged_batch_equals_plain_forwards(make_scheduler: MakeScheduler, family: str, tied: bool) -> None:
    scheduler, model = make_scheduler(family, tied=tied, max_rows=5, cache_rows=7)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.booleans()), min_size=1, max_size=9))
    def check(calls: list[tuple[list[int], int, bool]]) -> None:
        sequences = [
            call(str(i), prompt, new, temperature=0.0 if greedy else 1.0)
            for i, (prompt, new, greedy) in enumerate(calls)
        ]
        run(scheduler, *sequences)
        for sequence, (_, new, greedy) in zip(sequences, calls, strict=True):
            assert len(sequence.token_ids) == new
            assert sequence.finish_reason == "length"
            assert_exact(sequence, model)
            if greedy:
                table = logprobs(model, sequence.prompt + sequence.token_ids)[len(sequence.prompt) - 1 : -1]
                assert sequence.logprobs == pytest.approx(table.max(dim=-1).values.tolist(), abs=TOLERANCE)
                assert set(sequence.ranks) == {1}

    check()


def test_sessions_reuse_their_prefix_and_stay_exact(make_scheduler: MakeScheduler) -> None:
    scheduler, model = make_scheduler(max_rows=3, cache_rows=5)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(PROMPTS, min_size=1, max_size=4), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    def check(prompts: list[list[int]], told: list[int]) -> None:
        first = [call(str(i), prompt) for i, prompt in enumerate(prompts)]
        run(scheduler, *first)
        second = [call(s.id, s.prompt + s.token_ids + told) for s in first]
        run(scheduler, *second)
        for before, sequence in zip(first, second, strict=True):
            assert_exact(sequence, model)
            if len(prompts) <= 3:
                assert sequence.cached >= before.length - 1

    check()


def test_cache_is_partitioned_by_salt(make_scheduler: MakeScheduler) -> None:
    scheduler, _ = make_scheduler()
    prompt = list(range(40))
    for salt, found in (("1", 0), ("1", 39), ("2", 0)):
        sequence = call("a", prompt, salt=salt)
        run(scheduler, sequence)
        assert sequence.cached == found


def test_attempts_at_one_prompt_compute_it_once(make_scheduler: MakeScheduler) -> None:
    scheduler, model = make_scheduler()
    prompt = [(i * 7) % VOCAB for i in range(100)]
    attempts = [call(str(i), prompt) for i in range(4)]
    run(scheduler, *attempts)
    assert scheduler.computed < 2 * len(prompt)
    assert sorted(s.cached for s in attempts) == [0, 99, 99, 99]
    for sequence in attempts:
        assert_exact(sequence, model)


def test_long_prompt_is_computed_in_pieces(make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 16)
    scheduler, model = make_scheduler()
    sequences = [call(str(i), [(i + j * j) % VOCAB for j in range(20 + 30 * i)]) for i in range(4)]
    run(scheduler, *sequences)
    for sequence in sequences:
        assert_exact(sequence, model)


def test_update_in_the_middle_labels_each_token_with_its_weights(make_scheduler: MakeScheduler) -> None:
    scheduler, old = make_scheduler()
    new = tiny_model(seed=1)
    sequences = [call(str(i), [i, 2, 3], 20) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(5):
        scheduler.step()
    scheduler.install(dict(new.named_parameters()), 2)
    while not scheduler.idle:
        scheduler.step()
    assert [len(s.runs()) for s in sequences] == [2, 2, 2, 2, 1, 1]
    for sequence in sequences:
        full = sequence.prompt + sequence.token_ids
        for span in sequence.runs():
            model = {1: old, 2: new}[span.version]
            expected = token_logprobs(model, full)[len(sequence.prompt) - 1 :]
            assert sequence.logprobs[span.start : span.end] == pytest.approx(
                expected[span.start : span.end], abs=TOLERANCE
            )


def test_update_voids_the_cache(make_scheduler: MakeScheduler) -> None:
    scheduler, _ = make_scheduler()
    run(scheduler, call("a", range(30)))
    new = tiny_model(seed=1)
    scheduler.install(dict(new.named_parameters()), 2)
    again = call("b", range(30))
    run(scheduler, again)
    assert again.cached == 0
    assert_exact(again, new)


def test_abort_returns_what_was_sampled_and_frees_the_row(make_scheduler: MakeScheduler) -> None:
    scheduler, model = make_scheduler(max_rows=2)
    sequences = [call(str(i), [i, i + 1], 30) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(4):
        scheduler.step()
    ended = scheduler.abort(lambda s: s.id in ("0", "2"))
    assert [s.id for s in ended] == ["0", "2"]
    assert [len(s.token_ids) for s in ended] == [5, 0]
    assert {s.finish_reason for s in ended} == {"abort"}
    assert scheduler.abort(lambda s: s.id == "0") == []
    while not scheduler.idle:
        scheduler.step()
    assert len(sequences[1].token_ids) == 30
    assert_exact(sequences[1], model)
    assert (scheduler.running, scheduler.waiting, scheduler.runner.kv.usage) == (0, 0, 0.0)


def test_stop_tokens_end_a_call_and_are_kept(make_scheduler: MakeScheduler) -> None:
    scheduler, _ = make_scheduler()
    free = call("a", [3, 1, 4], 12, temperature=0.0)
    run(scheduler, free)
    stop = free.token_ids[5]
    until = free.token_ids[: free.token_ids.index(stop) + 1]
    for ends, reason in ((frozenset[int](), stop), (frozenset({stop}), None)):
        stopped = call("b", [3, 1, 4], 12, temperature=0.0, stop_ids=frozenset({stop}), end_ids=ends)
        run(scheduler, stopped)
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (until, "stop", reason)


def test_a_call_may_fill_the_context(make_scheduler: MakeScheduler) -> None:
    scheduler, model = make_scheduler()
    sequence = call("a", [i % VOCAB for i in range(CONTEXT - 5)], 5)
    run(scheduler, sequence, call("b", [1, 2], 50))
    assert len(sequence.token_ids) == 5
    assert_exact(sequence, model)


def test_lower_priority_number_goes_first(make_scheduler: MakeScheduler) -> None:
    scheduler, _ = make_scheduler(max_rows=1)
    late, early = call("late", [1], 3, priority=5), call("early", [2], 3, priority=-1)
    ended: list[str] = []
    for sequence in (late, early):
        scheduler.add(sequence)
    while not scheduler.idle:
        ended += [s.id for s in scheduler.step()]
    assert ended == ["early", "late"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40))
def test_prompt_logprobs_are_those_of_the_serving_weights(make_scheduler: MakeScheduler, prompt: list[int]) -> None:
    scheduler, model = make_scheduler()
    probe = call("p", prompt, 1, score_prompt=True)
    run(scheduler, probe)
    assert probe.prompt_logprobs == pytest.approx(token_logprobs(model, prompt), abs=TOLERANCE)
