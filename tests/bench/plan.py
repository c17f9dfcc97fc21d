"""How long the simulator takes for a large cluster, on one core; prints JSON.

python tests/bench/plan.py [--steps 50]

Cases: 10,000 GPUs (1,250 instances of 8) in each form, with 131,072 episodes a step; and 100,000 sandboxes held by
multi-turn episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace

from agentrl.plan.simulate import Form, Parameters, Policy, simulate
from agentrl.plan.workload import Lengths

LARGE = Parameters(
    form=Form.COLOCATED, policy=Policy.WAIT, replicas=1250, concurrency=96, batch=131_072, steps=50, group_size=16,
    tokens=Lengths(kind="lognormal", mean=8192, sigma=0.8, cap=32_768), decode_base_s=0.008, decode_sequence_s=0.0003,
    train_s=120.0, sync_s=5.0, continue_s_per_token=2e-6,
)  # fmt: skip
AGENTIC = replace(
    LARGE, form=Form.ASYNC, policy=Policy.PARTIAL, concurrency=80, batch=20_000, group_size=8, turns=20,
    tokens=Lengths(kind="lognormal", mean=400, sigma=0.8, cap=4000), prefill_s=0.05,
    environment=Lengths(kind="lognormal", mean=30, sigma=1.0, cap=600),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    cases = {
        "colocated, wait": LARGE,
        "one_step, partial": replace(LARGE, form=Form.ONE_STEP, policy=Policy.PARTIAL),
        "async, drop": replace(LARGE, form=Form.ASYNC, policy=Policy.DROP),
        "async, agentic": AGENTIC,
    }
    found = {}
    for name, parameters in cases.items():
        began = time.process_time()
        result = simulate(replace(parameters, steps=steps))
        found[name] = {
            "gpus": 8 * parameters.replicas,
            "steps": steps,
            "episodes": int(result.tally.trained.sum() + result.tally.dropped.sum()),
            "sandboxes_peak": result.sandboxes.peak,
            "simulated_s": round(result.steps[-1].ended, 1),
            "cpu_s": round(time.process_time() - began, 2),
        }
    print(json.dumps({"cpus": os.cpu_count(), "cases": found}, indent=2))


if __name__ == "__main__":
    main()
