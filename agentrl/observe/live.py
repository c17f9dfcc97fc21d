"""Follows a run while it trains: a picture that changes in place on a terminal, one line a step elsewhere.

Used by `agentrl train` and `agentrl eval` around the launcher. Invariant: watching reads only, and its own
failures never reach the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live

from agentrl.observe.history import mismatch
from agentrl.observe.panel import clock, panel
from agentrl.observe.view import TITLES, RunView

log = logging.getLogger(__name__)

PERIOD_S = 0.5


class Lines:
    """The plain form: a line for each phase, each training step and each evaluation, as they come."""

    def __init__(self, console: Console, view: RunView) -> None:
        self._console = console
        self._view = view
        self._phases = 0
        self._steps = 0
        self._warm = 0
        self._evaluated: set[str] = set()

    def show(self) -> None:
        """Print what is new since the last call."""
        view = self._view
        for phase in view.phases[self._phases :]:
            self._say(f"[{clock(phase.began - view.phases[0].began)}] {TITLES.get(phase.name, phase.name)}")
        self._phases = len(view.phases)
        for row in view.warm[self._warm :]:
            if row["step"] % 50 == 0:
                self._say(
                    f"  warm start {row['step']:.0f}/{view.config.warm_start.steps}  loss {row['train/warm_loss']:.3f}"
                )
        self._warm = len(view.warm)
        for row in view.rows[self._steps :]:
            figures = [f"  step {row['step']:.0f}/{view.config.train.steps}", f"reward {row.get('reward/mean', 0):.3f}"]
            figures.append(f"lag {row.get('train/lag_mean', 0):.2f}")
            if (gap := mismatch(row)) is not None:
                figures.append(f"mismatch {gap:.1e}")
            figures.append(f"{row.get('train/step_s', 0):.1f} s")
            self._say("  ".join(figures))
        self._steps = len(view.rows)
        for label, rate in view.success_rates().items():
            if label not in self._evaluated:
                self._say(f"  success on held-out tasks, {label}: {rate:.3f}")
                self._evaluated.add(label)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@asynccontextmanager
async def watching(view: RunView, console: Console, *, live: bool) -> AsyncIterator[None]:
    """Show `view` for the duration of the block, as a picture when `live` and the console is a terminal."""
    with contextlib.ExitStack() as shown:
        if live and console.is_terminal:
            picture = shown.enter_context(Live(panel(view), console=console, auto_refresh=False))
            show = lambda: picture.update(panel(view), refresh=True)  # noqa: E731
        else:
            show = Lines(console, view).show
        ended = asyncio.Event()
        task = asyncio.create_task(_follow(view, show, ended), name="live-view")
        try:
            yield
        finally:
            ended.set()
            await task
            await view.gauges.close()
            await view.status.close()


async def _follow(view: RunView, show: Callable[[], None], ended: asyncio.Event) -> None:
    try:
        while not ended.is_set():
            await view.refresh()
            show()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await ended.wait()
        await view.refresh()
        show()
    except Exception:
        log.exception("the live view failed; the run goes on without it")
