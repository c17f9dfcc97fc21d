"""One quickstart, which the tests of this folder share: they look at it, or start from its warm policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished quickstart."""
    place = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(QUICKSTART), f"dir={place}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return place / "quickstart"
