"""Does the quickstart learn? Runs it for three seeds and prints the table as JSON, and each run's wall time.

python tests/bench/learning.py [--form async|sync|one_step] [--seeds 0 1 2] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def run(seed: int, form: str, folder: Path, overrides: list[str]) -> dict[str, object]:
    """Train once with one seed; the summary's main figures."""
    name = f"seed-{seed}"
    settings = [f"seed={seed}", f"name={name}", f"dir={folder}", f"rollout.form={form}"]
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(CONFIG), *settings]
    started = time.monotonic()
    print(f"seed {seed}: training, form {form} ...", file=sys.stderr, flush=True)
    done = subprocess.run([*command, *overrides], stdout=subprocess.PIPE, text=True)
    wall_s = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"seed {seed} ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    summary = json.loads((folder / name / "summary.json").read_text())
    keys = ("eval_before", "eval_after")
    return {"seed": seed, **{key: summary[key] for key in keys}, "wall_s": round(wall_s, 1), "summary": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", default="async")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(seed, options.form, Path(folder), options.overrides) for seed in options.seeds]
    learned = all(row["eval_before"] <= 0.70 and row["eval_after"] >= 0.85 for row in rows)  # type: ignore[operator]
    print(json.dumps({"bench": "learning", "form": options.form, "learned": learned, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
