"""Every number of the published worked examples, computed by the room. A row's name says where the number stands.

The tables are tests/support/seeds_*.py: one a document or part. 000 is the drill set, 001 the exercise set, 003 the
long page. Numbers that do not follow from what their document says are in UNREPRODUCED there, with
the reason.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import seed_rows
from seed_rows import Row, Unreproduced

TABLES = [importlib.import_module(path.stem) for path in sorted(Path(seed_rows.__file__).parent.glob("seeds_*.py"))]
ROWS: list[Row] = [row for table in TABLES for row in table.ROWS]
UNREPRODUCED: list[Unreproduced] = [entry for table in TABLES for entry in table.UNREPRODUCED]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.where)
def test_number(row: Row) -> None:
    assert row.problem() is None


def test_each_number_has_one_entry() -> None:
    names = [entry.where for entry in (*ROWS, *UNREPRODUCED)]
    assert sorted(names) == sorted(set(names))


def test_what_is_not_reproduced_says_why() -> None:
    for entry in UNREPRODUCED:
        assert len(entry.reason) > 20, entry.where
