"""Makes files outlast a power cut. Used where a rename publishes what was written: checkpoints and weights."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
