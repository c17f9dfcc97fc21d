"""A small finished run, which several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import SMALL, processes_of, run_agentrl


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that ended well."""
    place = tmp_path_factory.mktemp("finished")
    done = run_agentrl("train", *SMALL, f"dir={place}", "name=small", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes_of(place)
    return place / "small"
