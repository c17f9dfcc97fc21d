"""The metrics page is what the rooms declare, and every name follows the scheme."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.observe.table import metric_specs, metrics_page

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == metrics_page(), "run: python -m agentrl.observe.table > docs/metrics.md"


def test_names_follow_the_scheme_and_are_declared_once() -> None:
    names = [spec.name for spec in metric_specs()]
    assert len(names) == len(set(names))
    scheme = re.compile(r"(rollout|train|weights|sandbox|reward|gateway)/[a-z0-9_]+(/SOURCE)?")
    assert [name for name in names if not scheme.fullmatch(name)] == []
