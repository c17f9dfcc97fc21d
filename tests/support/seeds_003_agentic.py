"""003, chapter 2 section 6: 500 tasks x 8 attempts x 20 turns on 32 cards."""

from __future__ import annotations

from functools import cache

from seed_plans import plan_8b, plan_agentic
from seed_rows import Row, Unreproduced

from agentrl.plan.figure import Figure, Input
from agentrl.plan.ledger import Ledger, Rollout
from agentrl.plan.ledger.decode import decode_step_s, instance_tokens_per_s
from agentrl.plan.ledger.kv import kv_bytes, residency
from agentrl.plan.ledger.prefill import mixed_prefill_s, prefill_s
from agentrl.plan.ledger.sandboxes import cpu_hours, versions_spanned


@cache
def _book() -> Ledger:
    return Ledger(plan_agentic())


def _held(unit: int = 1000) -> Figure:
    """KV of an episode half way: 20K tokens."""
    return kv_bytes("episode_kv_bytes", Input("mean_context_tokens", 20 * unit), _book().rollout.kv_per_token)


def _held_by_card() -> Figure:
    """KV of the 125 episodes on a card, in the page's binary units."""
    return kv_bytes("episodes_kv_bytes", Input("tokens", 125 * 20 * 1024), _book().rollout.kv_per_token)


def _once() -> Figure:
    """Prefill of every token of the step once, sampled ones too: the page shares no block that was sampled."""
    rollout = _book().rollout
    given = rollout.given
    gpus, mfu = given.gpus("rollout_gpus", 32), given.assumed("prefill_mfu")
    return prefill_s("prefill_once_s", rollout.tokens.all, given.active_parameters, gpus, given.peak_flops, mfu)


def _residency() -> Figure:
    return residency(Input("kv_pool_bytes", 50 * 2**30, "B"), _held_by_card())


def _step_of_31() -> Figure:
    rollout = _book().rollout
    given = rollout.given
    return decode_step_s(
        rollout.weight_bytes, Input("decoding_sequences", 31), Input("mean_context_tokens", 20_000),
        rollout.kv_per_token,
        given.instance_gpus, given.memory_rate, given.assumed("memory_efficiency"),
    )  # fmt: skip


def _rate_of_31() -> Figure:
    return instance_tokens_per_s(Input("decoding_sequences", 31), _step_of_31())


def _two_core_hours() -> Figure:
    return cpu_hours(_book().sandboxes.executions, Input("turn_environment_s", 30, "s"), Input("environment_cores", 2))


ROWS = [
    Row("003 2.6 episodes 4000", 4000, lambda: plan_agentic().workload.episodes, relative=0),
    Row("003 2.6 executions 80,000", 80_000, lambda: _book().sandboxes.executions, relative=0),
    Row("003 2.6 CPU hours at one core 667", 667, lambda: _book().sandboxes.cpu_hours),
    Row("003 2.6 CPU hours at two cores 1300", 1300, _two_core_hours, rounded_to=100),
    Row("003 2.6 wall clock of an episode 800 s", 800, lambda: _book().rollout.mean_episode),
    Row("003 2.6 stateful sandboxes 1800", 1800, lambda: _book().sandboxes.stateful),
    Row("003 2.6 releasable sandboxes 1300", 1300, lambda: _book().sandboxes.releasable, rounded_to=100),
    Row("003 2.6 hosts of 80 cores 45", 45, lambda: _book().sandboxes.hosts, relative=0),
    Row("003 2.6 sampled tokens 32M", 32e6, lambda: _book().rollout.tokens.sampled),
    Row("003 2.6 tokens with everything cached 160M", 160e6, lambda: _book().rollout.tokens.all),
    Row("003 2.6 tokens with nothing cached 1.6B", 1.6e9, lambda: _book().rollout.tokens.prefill_cold),
    Row("003 2.6 prefill of each token once 160 s", 160, lambda: _once()),
    Row("003 2.6 prefill with nothing cached 1600 s", 1600, lambda: _book().rollout.prefill.cold),
    Row(
        "003 2.6 prefill at the real residency 1400 s (printed pool)",
        1400,
        lambda: mixed_prefill_s(_residency(), _once(), _book().rollout.prefill.cold),
    ),
    Row("003 2.6 prefill at the real residency 1400 s (ledger)", 1400, lambda: _book().rollout.prefill.seconds),
    Row(
        "003 2.6 the cache saves ten times the prefill",
        10,
        lambda: _book().rollout.tokens.prefill_cold.value / _book().rollout.tokens.all.value,
    ),
    Row("003 2.6 training goes over 160M tokens", 160e6, lambda: _book().rollout.tokens.all),
    Row("003 2.6 step 15 EFLOP", 15e18, lambda: _book().flops.step, rounded_to=1e18),
    Row(
        "003 2.6 twice the 8B's 6.8 EFLOP",
        2,
        lambda: _book().flops.step.value / Ledger(plan_8b()).flops.step.value,
        rounded_to=1,
    ),
    Row("003 2.6 eight of ten tokens are the environment's", 0.8, lambda: _book().rollout.tokens.environment_share),
    Row(
        "003 2.6 decoding at once on a card 31",
        31,
        lambda: plan_agentic().workload.episodes / 32 * _book().find("generating_share").value,
    ),
    Row("003 2.6 weights read a step 16 GB", 16e9, lambda: _book().rollout.weight_bytes),
    Row("003 2.6 KV read a step 80 GB", 80e9, lambda: 31 * _held().value),
    Row("003 2.6 decode step 48 ms", 0.048, _step_of_31),
    Row("003 2.6 tokens a second on a card 650", 650, _rate_of_31),
    Row(
        "003 2.6 that is a quarter of single turn",
        0.25,
        lambda: _rate_of_31().value / Rollout(plan_8b(), 64).instance_rate.value,
    ),
    Row(
        "003 2.6 episodes on a card 125",
        125,
        lambda: plan_agentic().workload.episodes / _book().rollout.instances.value,
    ),
    # The page counts these in binary units.
    Row("003 2.6 KV of an episode 2.5 GB", 2.5 * 2**30, lambda: _held(1024)),
    Row("003 2.6 KV of a card's episodes 310 GB", 310 * 2**30, _held_by_card),
    Row("003 2.6 six times the pool", 6, lambda: 1 / _residency().value, rounded_to=1),
    Row("003 2.6 about a sixth hits", 1 / 6, lambda: _book().rollout.prefill.residency, rounded_to=0.01),
    Row(
        "003 2.6 versions an episode spans 5",
        5,
        lambda: versions_spanned(_book().rollout.mean_episode, Input("sync_interval_s", 150, "s")),
        rounded_to=1,
    ),
]

UNREPRODUCED = [
    Unreproduced(
        "003 2.6 decode 500 s, 28 % of 30 minutes",
        "500 s",
        "32M tokens at the printed 650 tokens a second on each of 32 cards are 1,540 s; 500 s would need "
        "2,000 tokens a second, which the page nowhere derives",
    ),
    Unreproduced(
        "003 2.6 31 sequences of 20K on one card",
        "80 GB of KV",
        "16 GB of weights and 80 GB of KV exceed the card's 80 GB: the rows above compute the printed step, "
        "the ledger of the plan decodes the 20 sequences that fit",
    ),
    Unreproduced(
        "003 2.6 CPU machines are ten times the GPU machines", "10x", "45 to 4 is 11 times; the page rounds in words"
    ),
    Unreproduced(
        "003 2.6 tail share above 0.8",
        "> 0.8",
        "a bound for environments of unstated variance; the case of 85 % is a row",
    ),
]
