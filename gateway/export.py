"""Exports a session's tree as trajectories. Called when a session is sealed, and again on request.

Invariant: the ids of a trajectory are exactly what the engine received and returned along one line of calls, and
each sampled token trains in exactly one trajectory, that of the first surviving leaf below it, or in none, if a schema
constrained its draw. A pure function of the tree, so repeating it gives the same trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.errors import GatewayError
from agentrl.core.types import Provenance, Trajectory
from gateway.tree import Node, Tree


def export(session_id: str, tree: Tree) -> tuple[Trajectory, ...]:
    """One trajectory a surviving leaf, in order of creation.

    A line whose calls were sampled in different ways (temperature, engine) gives one trajectory a way, since a
    trajectory names one provenance; their masks are disjoint.
    """
    trained: set[int] = set()
    drafts: list[tuple[Node, Provenance, set[int]]] = []
    for leaf in tree.leaves():
        by_provenance: dict[str, tuple[Provenance, set[int]]] = {}
        for node in leaf.path():
            if node.seq not in trained and node.sampled and not node.constrained:
                ours = by_provenance.setdefault(node.provenance.model_dump_json(), (node.provenance, set()))
                ours[1].add(node.seq)
        if leaf.constrained and not by_provenance:
            # Nothing new to train on, but what was said last is part of the record.
            by_provenance[""] = (leaf.provenance, set())
        for provenance, seqs in by_provenance.values():
            trained |= seqs
            drafts.append((leaf, provenance, seqs))
    session_tokens = sum(len(node.sampled) for node in tree if node.seq in trained)
    return tuple(
        _trajectory(session_id, number, leaf, provenance, seqs, session_tokens)
        for number, (leaf, provenance, seqs) in enumerate(drafts)
    )


def _trajectory(
    session_id: str, number: int, leaf: Node, provenance: Provenance, trained: set[int], session_tokens: int
) -> Trajectory:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    versions: list[int | None] = []
    for node in leaf.path():
        ids += node.prompt_delta
        mask += [0] * len(node.prompt_delta)
        logprobs += [None] * len(node.prompt_delta)
        versions += [None] * len(node.prompt_delta)
        ids += node.sampled
        mask += [int(node.seq in trained)] * len(node.sampled)
        logprobs += node.logprobs
        versions += [run.version for run in node.versions for _ in range(run.start, run.end)]
    if tuple(ids) != leaf.token_ids():
        raise GatewayError(f"session {session_id}: trajectory {number} differs from the tokens of call {leaf.seq}")
    return Trajectory(
        id=f"{session_id}/{number}", session_id=session_id, token_ids=tuple(ids), loss_mask=tuple(mask),
        behavior_logprobs=tuple(logprobs), policy_versions=tuple(versions),
        finish="truncated" if leaf.finish_reason == "length" else "terminated",
        session_tokens=session_tokens, provenance=provenance,
    )  # fmt: skip


def check_exact(node: Node, prompt_ids: Sequence[int]) -> None:
    """Token exactness at commit: the tree says what the engine received. GatewayError if it would not."""
    if node.prompt_ids() != tuple(prompt_ids):
        raise GatewayError(
            f"call {node.seq}: the tree holds {len(node.prompt_ids())} prompt tokens that differ from the "
            f"{len(prompt_ids)} sent to the engine; the call is not recorded"
        )
    if not len(node.sampled) == len(node.logprobs) == (node.versions[-1].end if node.versions else 0):
        raise GatewayError(f"call {node.seq}: sampled tokens, logprobs and versions differ in length")
