"""All replicas of the engine at once, as arrays: one row a replica, one column a place for a trajectory.

Used by `batches` and `stream`, which say when work is handed in, when weights change and when to stop. Between two such
moments replicas do not touch each other, so each iteration moves every replica to its own next event. Sequences of a
replica decode in lock step: its clock counts tokens, and only the token clock's speed depends on how many there are.
Invariant: what happens until a moment does not depend on how many calls of `advance` lead there.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from agentrl.plan.simulate.draws import Floats, Ints, draw
from agentrl.plan.simulate.parameters import Parameters
from agentrl.plan.simulate.sandboxes import Pools, Timeline

ROW = np.dtype(
    [
        ("time", "f8"),  # seconds when it finished
        ("id", "i8"),
        ("tokens", "f8"),
        ("began", "f8"),  # seconds when it got its place
        ("version", "i8"),  # of the weights that its first token was sampled with
        ("weighted", "f8"),  # sum over its tokens of the version that sampled them
    ]
)
Rows = NDArray[np.void]
TOKENS, ENVIRONMENT = 0, 1
"""Streams of draws."""
BINS_PER_BATCH = 100


class Replicas:
    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        rows, places = parameters.replicas, parameters.places
        self.now = np.zeros(rows)
        """Seconds that each replica has come to."""
        self.clock = np.zeros(rows)
        """Tokens that a sequence decoding since the start would have by now."""
        self.running = np.zeros(rows, dtype=np.int64)
        """Sequences that decode."""
        self.quota = np.zeros(rows, dtype=np.int64)
        """Trajectories that wait for a place."""
        self.issued = np.zeros(rows, dtype=np.int64)
        """Trajectories that got a place so far."""
        self.turn_ends = np.full((rows, places), math.inf)
        """Clock at which a decoding sequence ends its turn."""
        self.waiting = np.full((rows, places), math.inf)
        """Place in the queue of those whose turn waits for `decode_limit`."""
        self.queued = np.zeros(rows)
        """Turns that ever waited."""
        self.returns = np.full((rows, places), math.inf)
        """Seconds at which an execution ends."""
        self.taken = np.zeros((rows, places), dtype=bool)
        self.turns_left = np.zeros((rows, places), dtype=np.int64)
        self.ids = np.zeros((rows, places), dtype=np.int64)
        turns = parameters.turns
        self.turn_tokens = np.zeros((rows, places, turns))
        self.turn_seconds = np.zeros((rows, places, turns if parameters.has_environment else 0))
        """Of the execution after each turn."""
        self.tokens = np.zeros((rows, places))
        """Of all turns of a trajectory."""
        self.drawn = np.zeros((rows, places))
        """Of its turns so far, the running one included."""
        self.began = np.zeros((rows, places))
        self.first_version = np.zeros((rows, places), dtype=np.int64)
        self.weighted = np.zeros((rows, places))
        self.marked = np.zeros((rows, places))
        """Tokens of a trajectory that `weighted` has counted."""
        self.version = 0
        self.decoding_s = np.zeros(rows)
        """Seconds in which at least one sequence decoded."""
        self.sequence_s = np.zeros(rows)
        """Seconds of decoding, summed over the sequences."""
        self.continued_tokens = 0.0
        """Tokens that were prefilled again after an interruption."""
        shares = 0 if parameters.sandbox_held else parameters.sandboxes // rows
        self.pools = Pools(rows, shares) if shares else None
        bin_s = max(parameters.generation_s, parameters.train_s, 1e-9) / BINS_PER_BATCH
        self.in_flight = Timeline(bin_s)
        self.sandboxes = Timeline(bin_s)

    def hand_in(self, trajectories: int) -> None:
        """Queue further groups, evenly: the attempts at one task stay with one replica."""
        size = self.parameters.group_size
        share, rest = divmod(math.ceil(trajectories / size), len(self.now))
        self.quota += share * size
        # What cannot be split goes to the replicas that had the least so far.
        self.quota[np.argsort(self.issued + self.quota, kind="stable")[:rest]] += size
        free = ~self.taken
        rank = np.cumsum(free, axis=1)
        rows, columns = np.nonzero(free & (rank <= self.quota[:, None]))
        self._start(rows, columns, rank[rows, columns] - 1)

    def advance(self, until: float) -> Rows:
        """Move every replica to `until`; returns the trajectories that finished, in the order of time."""
        finished: list[Rows] = [np.empty(0, dtype=ROW)]
        while self._next_event(until, finished):
            pass
        if until < math.inf:
            late = np.flatnonzero(self.now < until)
            self._move(late, np.full(len(late), until))
        found = np.concatenate(finished)
        return found[np.argsort(found["time"], kind="stable")]

    @property
    def unfinished(self) -> int:
        """Trajectories that hold a place or wait for one."""
        return int(self.taken.sum() + self.quota.sum())

    def begun_before(self, version: int) -> int:
        """Trajectories in flight whose first token older weights sampled."""
        return int((self.taken & (self.first_version < version)).sum())

    def oldest_version(self) -> int | None:
        """Of the weights that any trajectory in flight began with."""
        return int(self.first_version[self.taken].min()) if self.taken.any() else None

    def load(self, version: int, at: float, pause_s: float, interrupt: bool) -> None:
        """New weights: nothing decodes from `at` for `pause_s`, nor while what was cut is prefilled again."""
        self._mark()
        self.version = version
        self.now = np.maximum(self.now, at) + pause_s
        if interrupt:
            again = np.where(self.turn_ends < math.inf, self.marked, 0.0).sum(axis=1)
            self.continued_tokens += float(again.sum())
            self.now += again * self.parameters.continue_s_per_token

    def discard(self, at: float) -> tuple[Floats, float]:
        """Throw away everything unfinished; returns the full lengths, and the tokens that were sampled in vain."""
        self._mark()
        lengths, wasted = self.tokens[self.taken], float(self.marked[self.taken].sum())
        self._left(np.full(len(lengths), at))
        self.turn_ends[:], self.returns[:], self.waiting[:], self.taken[:] = math.inf, math.inf, math.inf, False
        self.running[:], self.quota[:] = 0, 0
        # Numbers of groups that will never be whole are not used again.
        self.issued = -(-self.issued // self.parameters.group_size) * self.parameters.group_size
        return lengths, wasted

    def _next_event(self, until: float, finished: list[Rows]) -> bool:
        """Move each replica to its next event, unless that comes after `until`."""
        each = np.arange(len(self.now))
        columns = self.turn_ends.argmin(axis=1)
        ends = self.turn_ends[each, columns]
        at = self.now + (ends - self.clock) * self._step_s(self.running)
        if self.parameters.has_environment:
            back = self.returns.argmin(axis=1)
            back_at = np.maximum(self.returns[each, back], self.now)
            returned = back_at < at
            rows = np.flatnonzero(returned & (back_at <= until) & (back_at < math.inf))
            self._move(rows, back_at[rows])
            self.returns[rows, back[rows]] = math.inf
            self._turn_over(rows, back[rows], finished)
            turned = np.flatnonzero(~returned & (at <= until) & (at < math.inf))
        else:
            rows, turned = each[:0], np.flatnonzero((at <= until) & (at < math.inf))
        if turned.size:
            self._move(turned, at[turned])
            self.clock[turned] = ends[turned]
            self._turn_sampled(turned, columns[turned], finished)
        return bool(rows.size or turned.size)

    def _turn_sampled(self, rows: Ints, columns: Ints, finished: list[Rows]) -> None:
        """The last token of a turn: its execution begins, if there is one."""
        self.turn_ends[rows, columns] = math.inf
        self.running[rows] -= 1
        if self.parameters.decode_limit:
            first = self.waiting[rows].argmin(axis=1)
            ready = self.waiting[rows, first] < math.inf
            self.waiting[rows, first] = math.inf
            self._decode(rows[ready], first[ready])
        if not self.parameters.has_environment:
            self._turn_over(rows, columns, finished)
            return
        turn = self.parameters.turns - self.turns_left[rows, columns]
        seconds = self.turn_seconds[rows, columns, turn]
        begins = self.now[rows] if self.pools is None else self.pools.begin(rows, self.now[rows], seconds)
        self.returns[rows, columns] = begins + seconds
        if not self.parameters.sandbox_held:
            self.sandboxes.add(begins, 1)
            self.sandboxes.add(begins + seconds, -1)

    def _turn_over(self, rows: Ints, columns: Ints, finished: list[Rows]) -> None:
        """The next turn of the trajectories, or their end."""
        if not rows.size:
            return
        self.turns_left[rows, columns] -= 1
        ended = self.turns_left[rows, columns] == 0
        if not ended.all():
            again = rows[~ended]
            self._turn(again, columns[~ended], np.zeros_like(again))
        if ended.any():
            rows, columns = rows[ended], columns[ended]
            finished.append(self._finish(rows, columns))
            again = self.quota[rows] > 0
            self._start(rows[again], columns[again], np.zeros(int(again.sum()), dtype=np.int64))

    def _finish(self, rows: Ints, columns: Ints) -> Rows:
        tokens, version = self.tokens[rows, columns], self.version
        found = np.empty(len(rows), dtype=ROW)
        found["time"], found["id"], found["tokens"] = self.now[rows], self.ids[rows, columns], tokens
        found["began"], found["version"] = self.began[rows, columns], self.first_version[rows, columns]
        found["weighted"] = self.weighted[rows, columns] + (tokens - self.marked[rows, columns]) * version
        self.taken[rows, columns] = False
        self._left(self.now[rows])
        return found

    def _start(self, rows: Ints, columns: Ints, ranks: Ints) -> None:
        """Give places to queued trajectories; `ranks` counts those of one replica."""
        if not rows.size:
            return
        place = (rows, columns)
        self.ids[place] = (self.issued[rows] + ranks) * len(self.now) + rows
        started = np.bincount(rows, minlength=len(self.now))
        self.issued += started
        self.quota -= started
        known = self.parameters
        turns = self.ids[place][:, None] * known.turns + np.arange(known.turns)
        self.turn_tokens[place] = draw(known.tokens, known.seed, TOKENS, turns)
        if known.has_environment:
            self.turn_seconds[place] = draw(known.environment, known.seed, ENVIRONMENT, turns)
        self.tokens[place] = self.turn_tokens[place].sum(axis=1)
        self.began[place] = self.now[rows]
        self.first_version[place], self.turns_left[place], self.taken[place] = self.version, known.turns, True
        self.weighted[place], self.marked[place], self.drawn[place] = 0.0, 0.0, 0.0
        self.in_flight.add(self.now[rows], 1)
        if known.sandbox_held and known.has_environment:
            self.sandboxes.add(self.now[rows], 1)
        self._turn(rows, columns, ranks)

    def _turn(self, rows: Ints, columns: Ints, ranks: Ints) -> None:
        """Begin a turn, or wait for another's end; `ranks` counts those of one replica."""
        if limit := self.parameters.decode_limit:
            fits = self.running[rows] + ranks < limit
            late = ~fits
            self.waiting[rows[late], columns[late]] = self.queued[rows[late]] + ranks[late]
            np.add.at(self.queued, rows[late], 1.0)
            rows, columns = rows[fits], columns[fits]
        self._decode(rows, columns)

    def _decode(self, rows: Ints, columns: Ints) -> None:
        """Prefill, then decode: the replica's other sequences stand still during the prefill."""
        tokens = self.turn_tokens[rows, columns, self.parameters.turns - self.turns_left[rows, columns]]
        self.drawn[rows, columns] += tokens
        self.turn_ends[rows, columns] = self.clock[rows] + tokens
        started = np.bincount(rows, minlength=len(self.now))
        self.running += started
        self.now += started * self.parameters.prefill_s

    def _left(self, times: Floats) -> None:
        self.in_flight.add(times, -1)
        if self.parameters.sandbox_held and self.parameters.has_environment:
            self.sandboxes.add(times, -1)

    def _move(self, rows: Ints, to: Floats) -> None:
        """Let time pass at some replicas."""
        seconds, running = to - self.now[rows], self.running[rows]
        self.clock[rows] += np.where(running > 0, seconds / self._step_s(running), 0.0)
        self.decoding_s[rows] += np.where(running > 0, seconds, 0.0)
        self.sequence_s[rows] += seconds * running
        self.now[rows] = to

    def _mark(self) -> None:
        """Book what was sampled since the last mark to the current version."""
        missing = np.where(self.turn_ends < math.inf, self.turn_ends - self.clock[:, None], 0.0)
        sampled = self.drawn - missing
        self.weighted += np.where(self.taken, (sampled - self.marked) * self.version, 0.0)
        self.marked = np.where(self.taken, sampled, 0.0)

    def _step_s(self, running: Ints) -> Floats:
        # A step of no seconds would make "never" times nothing not a number.
        seconds: Floats = np.maximum(self.parameters.decode_base_s + self.parameters.decode_sequence_s * running, 1e-12)
        return seconds
