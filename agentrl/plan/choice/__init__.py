"""What to do with a plan: the form, the split, and what both bring with them. Called by the CLI and the report.

choice = choose(plan)
choice.chosen.label                 "async 42:22"
choice.options, choice.refused      every form, ranked by step time or refused with a reason
choice.figures()                    all of its numbers, each with its derivation
"""

from agentrl.plan.choice.choose import Choice, choose
from agentrl.plan.choice.forms import Form, Overlap
from agentrl.plan.choice.options import Option, Refused
from agentrl.plan.choice.split import Phases, Scaled, Split, fastest, split_at, split_curve
from agentrl.plan.choice.staleness import Staleness, staleness

__all__ = [
    "Choice",
    "Form",
    "Option",
    "Overlap",
    "Phases",
    "Refused",
    "Scaled",
    "Split",
    "Staleness",
    "choose",
    "fastest",
    "split_at",
    "split_curve",
    "staleness",
]
