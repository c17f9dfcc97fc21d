"""How a command's output is told from what its supervisor says, in a container without sandboxd."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sandbox.backends.docker.running import LONGEST_LINE, MOST_LINES, Marked

MARK = b"0123456789abcdef"
PIECES = st.lists(st.one_of(st.binary(max_size=40), st.just(MARK[:9]), st.just(b"\n")), max_size=6)


@given(before=PIECES, after=PIECES, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_marks_are_found_wherever_the_stream_is_cut(before: list[bytes], after: list[bytes], cuts: list[int]) -> None:
    first, second = b"".join(before), b"".join(after)
    whole = first + MARK + b"B\n" + second + MARK + b"E E 3 0 0\n"
    stream = Marked(MARK, 10_000)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    for start, end in itertools.pairwise(places):
        stream.feed(whole[start:end])
    assert stream.ended
    stream.finish()
    assert stream.lines == [["B"], ["E", "E", "3", "0", "0"]]
    assert stream.kept.bytes() == first + second


def test_a_stream_that_breaks_off_keeps_what_came() -> None:
    stream = Marked(MARK, 100)
    stream.feed(MARK + b"B\nsome output" + MARK[:5])
    assert not stream.ended
    stream.finish()
    assert stream.kept.bytes() == b"some output" + MARK[:5]


def test_a_task_that_knows_its_mark_fills_no_memory_with_it() -> None:
    stream = Marked(MARK, 100)
    stream.feed(MARK + b"\xff\n" + (MARK + b"x\n") * 1000)
    assert len(stream.lines) == MOST_LINES
    assert not stream.ended
    stream.feed(MARK + bytes(LONGEST_LINE))
    assert stream.kept.total == LONGEST_LINE, "all but what may begin another mark"
    stream.feed(MARK + b"\n" + MARK + b"E\n")
    assert stream.ended
