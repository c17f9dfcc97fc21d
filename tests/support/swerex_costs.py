"""What SWE-ReX's local runtime costs here: a session's start, a command in it, a command by itself.

Used by `tests/bench/sandbox.py`, which compares. It has a virtual environment of its own in the cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "1.4.0"
SCRIPT = """
import asyncio, json, logging, statistics, sys, time
logging.disable(logging.CRITICAL)
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, Command, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

async def main(rounds, commands):
    runtime, seen = LocalRuntime(), {"session_start": [], "session_run": [], "exec": []}

    async def timed(name, work):
        started = time.perf_counter()
        await work
        seen[name].append((time.perf_counter() - started) * 1e3)

    for i in range(rounds):
        await timed("session_start", runtime.create_session(CreateBashSessionRequest(session=f"s{i}")))
        for _ in range(commands):
            await timed("session_run", runtime.run_in_session(BashAction(session=f"s{i}", command="true")))
            await timed("exec", runtime.execute(Command(command=["true"])))
        await runtime.close_session(CloseBashSessionRequest(session=f"s{i}"))
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in seen.items()}))

asyncio.run(main(*map(int, sys.argv[1:])))
"""


def swerex_costs(rounds: int = 8, commands: int = 15) -> dict[str, Any]:
    """Medians in ms, or why there are none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = cache / "agentrl" / f"swerex-{VERSION}"
    try:
        if not (venv / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run([venv / "bin" / "pip", "install", "-qq", f"swe-rex=={VERSION}"], check=True)
            (venv / "ready").touch()
        # The interpreter of the environment, and nothing of ours.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        argv = [venv / "bin" / "python", "-c", SCRIPT, str(rounds), str(commands)]
        ran = subprocess.run(argv, check=True, capture_output=True, env=environment, cwd="/")
    except subprocess.CalledProcessError as error:
        return {"unavailable": f"{error}: {(error.stderr or b'').decode(errors='replace')[-500:]}"}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
