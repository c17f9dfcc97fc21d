"""Runs what the dispatcher decides: issues groups, plays their episodes, judges and stores them.

Awaited by `service` for the length of a training run. Invariant: every step is in the store before the next
one builds on it, so that a new process continues from the store alone; and the first exception of any
episode (a bug in plugin code, or a store that fails) ends the producer with its own traceback.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TypeAlias

from agentrl.core.config import RolloutConfig
from agentrl.core.errors import Blame, NoProgress
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Episode, Failed, Scored, Task
from agentrl.rollout.acceptance import Verdict, judge
from agentrl.rollout.dispatcher import Dispatcher, Ended, Result, Slot
from agentrl.rollout.episode import Order, Player
from agentrl.rollout.report import Reporter
from agentrl.rollout.retention import prune
from agentrl.rollout.store import EndedSlot, Issue, Store
from agentrl.rollout.tables import EpisodeState
from agentrl.rollout.tasks import TaskStream

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between readings of the ledger; between them the dispatcher knows of its own groups."""
PRUNED_AT_ONCE = 10
"""Steps whose episodes lose their tokens in one transaction, so that the trainer waits little for it."""
STREAK = 4
"""Lost attempts in a row from which new ones wait: a service is away, and spinning helps nobody."""
PAUSE_S = 5.0
"""Longest such wait."""

Playing: TypeAlias = "asyncio.Task[tuple[Slot, Ended]]"


class Producer:
    """The training episodes of one process."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        player: Player,
        store: Store,
        seed: int,
        steps: int,
        keep_steps: int,
        metrics: Metrics,
    ) -> None:
        """`keep_steps` committed steps keep the tokens of their episodes."""
        self._config = config
        self._player = player
        self._store = store
        self._seed = seed
        self._steps = steps
        self._keep_steps = keep_steps
        self._pruned_to = 0
        self._dispatcher = Dispatcher(config, steps=steps)
        self._reporter = Reporter(metrics, concurrency=config.concurrency)
        self._tasks: dict[str, Task] = {}
        self._stored: dict[Slot, str] = {}
        """Episode ids that are in the store and have not been started."""
        self._playing: set[Playing] = set()
        self._done: asyncio.Queue[Playing] = asyncio.Queue()
        self._moved = time.monotonic()
        self._observed = 0.0
        self._lost_streak = 0

    @property
    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    async def run(self) -> None:
        """Produce until all training steps are committed. Raises NoProgress, or what ended an episode."""
        try:
            # First the ledger: groups that end in the restoring count against what it says.
            await self._observe()
            stream = await self._restore()
            while True:
                await self._observe()
                if self._dispatcher.ledger.steps >= self._steps:
                    return
                await self._issue(stream)
                self._start()
                self._reporter.tick(self._dispatcher)
                self._check_progress()
                await self._collect()
        finally:
            await self._stop()

    async def _restore(self) -> TaskStream:
        unfinished = await self._store.unfinished()
        for group in unfinished:
            self._tasks[group.group_id] = group.task
            slots = [self._known(end, lost) for end, lost in zip(group.slots, group.tries, strict=True)]
            self._dispatcher.restore(group.group_id, slots, group.tries)
            await self._complete(group.group_id)
        if unfinished:
            log.info("continuing %d groups; their running episodes are issued again", len(unfinished))
        position = await self._store.cursor()
        limits = self._config.limits
        return TaskStream(self._player.environment, seed=self._seed, limits=limits, position=position)

    def _known(self, end: EndedSlot, lost: int) -> Ended | None:
        """How a slot had ended before the restart; None when it has to be played (again)."""
        if end.state is EpisodeState.ACCEPTED:
            return Ended(Result.SCORED, end.reward)
        if end.blame == Blame.AGENT:
            return Ended(Result.UNSCORED)
        return Ended(Result.LOST) if lost > self._config.reissues else None

    async def _observe(self) -> None:
        if time.monotonic() - self._observed < POLL_S:
            return
        self._observed = time.monotonic()
        ledger = await self._store.ledger()
        if ledger != self._dispatcher.ledger:
            self._moved = time.monotonic()
        self._dispatcher.observe(ledger)
        over = min(ledger.steps - self._keep_steps, self._pruned_to + PRUNED_AT_ONCE)
        if over > self._pruned_to:
            await prune(self._store.database, after=self._pruned_to, upto=over)
            self._pruned_to = over

    async def _issue(self, stream: TaskStream) -> None:
        while self._dispatcher.wants_group():
            task = stream.draw()
            group_id = f"g{stream.position:06d}"
            ids = tuple(_episode_id(group_id, index) for index in range(self._config.group_size))
            version = self._dispatcher.ledger.version
            await self._store.issue(Issue(group_id, task, ids), position=stream.position, version=version)
            self._tasks[group_id] = task
            self._stored |= {Slot(group_id, index): id_ for index, id_ in enumerate(ids)}
            self._dispatcher.admit(group_id)
            self._start()

    def _start(self) -> None:
        while (slot := self._dispatcher.next()) is not None:
            playing = asyncio.create_task(self._play(slot, self._stored.pop(slot, None)), name=f"episode-{slot}")
            self._playing.add(playing)
            playing.add_done_callback(self._done.put_nowait)

    async def _play(self, slot: Slot, episode_id: str | None) -> tuple[Slot, Ended]:
        queued_at = time.monotonic()
        if episode_id is None:
            episode_id = _episode_id(slot.group_id, slot.index)
            await self._store.reissue(episode_id, slot.group_id, slot.index)
        await asyncio.sleep(self._pause_s())
        task = self._tasks[slot.group_id]
        played = await self._player.play(Order(episode_id, slot.group_id, slot.index, task, queued_at))
        verdict = judge(played.episode, played.unreadable)
        await self._store.finish(played.episode, verdict)
        self._reporter.episode(played.episode, verdict)
        return slot, _meaning(played.episode, verdict)

    def _pause_s(self) -> float:
        return min(PAUSE_S, 0.05 * 2 ** min(self._lost_streak - STREAK, 8)) if self._lost_streak >= STREAK else 0.0

    async def _collect(self) -> None:
        """Take in the episodes that ended, waiting a poll interval for the first."""
        try:
            async with asyncio.timeout(POLL_S):
                ended = [await self._done.get()]
        except TimeoutError:
            return
        while not self._done.empty():
            ended.append(self._done.get_nowait())
        for playing in ended:
            self._playing.discard(playing)
            slot, end = playing.result()
            self._count(end)
            if self._dispatcher.ended(slot, end):
                self._reporter.reissued()
            else:
                await self._complete(slot.group_id)

    def _count(self, end: Ended) -> None:
        if end.result is Result.LOST:
            self._lost_streak += 1
        else:
            self._lost_streak = 0
            self._moved = time.monotonic()

    async def _complete(self, group_id: str) -> None:
        end = self._dispatcher.complete(group_id)
        if end is None:
            return
        del self._tasks[group_id]
        await self._store.end_group(group_id, end.reason, version=self._dispatcher.ledger.version)
        self._reporter.group(end)

    def _check_progress(self) -> None:
        still = time.monotonic() - self._moved
        busy = self._dispatcher.running > 0
        setting = "no_progress_s" if busy else "trainer_wait_s"
        limit = self._config.no_progress_s if busy else self._config.trainer_wait_s
        if still < limit:
            return
        raise NoProgress(
            f"rollout: nothing moved for {still:.0f} s (rollout.{setting} = {limit:g}); "
            f"waiting for {self._dispatcher.waiting_for()}; {self._reporter.failures()}. "
            "What was accepted is kept: continue with `agentrl train --resume`"
        )

    async def _stop(self) -> None:
        for playing in self._playing:
            playing.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        self._playing.clear()


def _episode_id(group_id: str, index: int) -> str:
    return f"{group_id}-{index}-{secrets.token_hex(4)}"


def _meaning(episode: Episode, verdict: Verdict) -> Ended:
    outcome = episode.outcome
    if verdict.state is EpisodeState.ACCEPTED and isinstance(outcome, Scored):
        return Ended(Result.SCORED, outcome.reward)
    if isinstance(outcome, Failed) and outcome.blame is Blame.AGENT:
        return Ended(Result.UNSCORED)
    return Ended(Result.LOST)
