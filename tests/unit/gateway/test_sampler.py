"""Parts of a completion become one, and stop texts end it at a token."""

from __future__ import annotations

import pytest

from agentrl.core.rendering import ConversationRenderer
from agentrl.core.types import Completion, VersionRun
from gateway.sampler import cut_at_stop, join


def part(ids: tuple[int, ...], version: int, finish: str = "abort") -> Completion:
    versions = (VersionRun(version=version, start=0, end=len(ids)),) if ids else ()
    fields = {"token_ids": ids, "logprobs": [-float(i) for i in ids], "finish_reason": finish, "versions": versions}
    return Completion.model_validate(fields | {"prompt_tokens": 7, "cached_tokens": version})


def test_each_token_keeps_its_version() -> None:
    joined = join([part((1, 2), 1), part((), 2), part((3,), 1), part((4, 5), 2, "stop")])
    assert joined.token_ids == (1, 2, 3, 4, 5)
    assert joined.logprobs == (-1.0, -2.0, -3.0, -4.0, -5.0)
    assert joined.versions == (VersionRun(version=1, start=0, end=3), VersionRun(version=2, start=3, end=5))
    assert (joined.finish_reason, joined.prompt_tokens, joined.cached_tokens) == ("stop", 7, 1)


def test_a_part_cut_at_the_budget_is_a_length() -> None:
    assert join([part((1,), 1)]).finish_reason == "length"


@pytest.mark.parametrize("stop", [["END"], ["never", "END"]])
def test_the_token_that_completes_a_stop_text_is_the_last(renderer: ConversationRenderer, stop: list[str]) -> None:
    ids = tuple(renderer.tokenizer.encode("one END two"))
    completion = part(ids, 3, "length")
    cut = cut_at_stop(completion, stop, renderer)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "END")
    assert cut.token_ids == ids[: len(cut.token_ids)]
    text = renderer.tokenizer.decode(cut.token_ids)
    assert "END" in text
    assert "END" not in renderer.tokenizer.decode(cut.token_ids[:-1])
    assert cut.versions[-1].end == len(cut.token_ids) == len(cut.logprobs)
    assert cut_at_stop(completion, ["never"], renderer) is completion
    assert cut_at_stop(completion, [], renderer) is completion
