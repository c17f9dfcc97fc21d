"""What one step of a plan takes, every number with its derivation. Called by the CLI, the choice and the report.

ledger = build_ledger(plan)
ledger.sections["Rollout"]          figures of one table
ledger.find("decode_step_s")        any figure or input that they rest on
"""

from agentrl.plan.ledger.book import Ledger, build_ledger
from agentrl.plan.ledger.flops import Flops
from agentrl.plan.ledger.memory import Stack, TrainerMemory, rollout_stack
from agentrl.plan.ledger.mfu import Phase, step_mfu, waterfall
from agentrl.plan.ledger.prefill import Prefill
from agentrl.plan.ledger.rollout import Rollout
from agentrl.plan.ledger.sandboxes import Sandboxes
from agentrl.plan.ledger.sync import Sync
from agentrl.plan.ledger.tokens import Tokens
from agentrl.plan.ledger.training import Training

__all__ = [
    "Flops",
    "Ledger",
    "Phase",
    "Prefill",
    "Rollout",
    "Sandboxes",
    "Stack",
    "Sync",
    "Tokens",
    "TrainerMemory",
    "Training",
    "build_ledger",
    "rollout_stack",
    "step_mfu",
    "waterfall",
]
