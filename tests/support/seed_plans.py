"""The plans behind the worked examples, as plan files would give them. Read by the tables of rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from agentrl.core.config import parse_section
from agentrl.plan.inputs import PlanInput

REASONING = {"kind": "lognormal", "mean": 8192, "cap": 32768}
"""L = 8K, and the longest of 8,192 responses is at the limit of 32K."""


def plan(
    model: str,
    gpus: int,
    *,
    gpu: str = "H100",
    prompts: int = 512,
    samples: int = 16,
    prompt_tokens: float = 500,
    response_tokens: Any = None,
    rollout: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **workload: Any,
) -> PlanInput:
    tree = {
        "model": {"name": model},
        "workload": {
            "prompts": prompts,
            "samples": samples,
            "prompt_tokens": prompt_tokens,
            "response_tokens": REASONING if response_tokens is None else response_tokens,
            **workload,
        },
        "cluster": {"gpu": gpu, "gpus": gpus},
        "rollout": rollout or {},
        "trainer": trainer or {},
    }
    return parse_section(PlanInput, tree, model)


@cache
def plan_8b(gpus: int = 64) -> PlanInput:
    """The scenario that the long page comes back to: 8B, B = 512, G = 16, L = 8K on H100s."""
    return plan("Llama-3-8B", gpus)


@cache
def plan_8b_ppo() -> PlanInput:
    return plan("Llama-3-8B", 64, trainer={"critic": True})


@cache
def plan_32b(gpus: int = 128) -> PlanInput:
    """Prompts of 1K here: part A question 3 says so, and the printed times need it."""
    return plan("Qwen2.5-32B", gpus, prompt_tokens=1024, rollout={"gpus_per_instance": 2})


@cache
def plan_v3() -> PlanInput:
    """The DeepSeek-V3 shape on 256 GPUs, an FP8 instance on 32."""
    return plan("DeepSeek-V3", 256, rollout={"gpus_per_instance": 32, "weight_bytes": 1})


@cache
def plan_agentic() -> PlanInput:
    """500 tasks x 8 attempts x 20 turns; 400 sampled tokens in 10 s a turn, 30 s of tests, 40K tokens at the end."""
    return plan(
        "Llama-3-8B", 32, prompts=500, samples=8, prompt_tokens=2000, response_tokens=400, turns=20, tool_tokens=1500,
        environment_s=30, environment_cores=1, sandbox_cores=2, turn_generation_s=10, rollout_target_s=1800,
    )  # fmt: skip
