"""The Python and the sandboxd that containers get: packed on this machine once, mounted into all. Used by `backend`.

Invariant: a folder under its name is whole, has been tried out, and never changes, since containers live in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import sandbox.runtime
from agentrl.core.errors import ConfigError
from sandbox.runtime.interpreter import command

SOURCES = Path(sandbox.runtime.__file__).parent
PACK = f"import sys; sys.path.insert(0, {str(SOURCES.parents[1])!r}); from sandbox.runtime.interpreter import pack; "
PACK_S = 120.0


def prepared(folder: Path) -> Path:
    """The one of our version in `folder`, packed where it is not there yet. ConfigError when it does not work."""
    place = folder.resolve() / f"runtime-{_version()}"
    if not place.exists():
        making = Path(tempfile.mkdtemp(prefix="runtime-", dir=folder.resolve()))
        try:
            making.chmod(0o755)
            _run([sys.executable, "-I", "-S", "-B", "-c", f"{PACK}pack({str(making)!r})"])
            _run(command(str(making), "from sandbox.runtime import handoff"))
            os.rename(making, place)
        except BaseException:
            shutil.rmtree(making)
            raise
    return place


def forget(folder: Path, *, but: Collection[str]) -> None:
    """Remove those of earlier versions, and what a controller was packing that was killed; not those of some names."""
    for path in folder.glob("runtime-*"):
        if path.name not in but:
            shutil.rmtree(path, ignore_errors=True)


def _version() -> str:
    """Of what is packed: this interpreter, and our sources."""
    found = hashlib.sha256(sys.version.encode())
    for path in (Path(sys.executable).resolve(), *sorted(SOURCES.glob("*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _run(words: list[str]) -> None:
    # Where the shared libraries of this Python are may be known by that variable only.
    env = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    try:
        subprocess.run(words, env=env, capture_output=True, check=True, timeout=PACK_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-500:]
        raise ConfigError(
            f"the Python of this controller, {sys.executable}, cannot be carried into containers: {error}: {said}. Run "
            "the controller with a Python that is dynamically linked, in a folder whose file system allows execution"
        ) from error
