"""One replica's update: stage, pause, commit, resume, verify. Used by `updater`.

Invariant: a replica that was paused is resumed, whatever happened in between, and `bring` returns only after
the probe agreed.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import WeightsError
from agentrl.core.protocols import Engine
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Probe, WeightManifest


@dataclass(frozen=True, slots=True)
class Target:
    """The version that replicas should serve."""

    manifest: WeightManifest
    path: Path
    """Of the manifest."""

    @property
    def version(self) -> int:
        return self.manifest.version


class Replica:
    """An engine and what is known of it."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine = engine
        self.version = -1
        """The last version that was verified and told to the pool."""
        self.problem = ""
        """What the last attempt failed with; empty after a success."""
        self.reachable = True
        """Whether it answered when it was last looked at."""
        self.mismatch = math.inf
        """Mean |trainer - engine| logprob over the last probe."""
        self.attempted = -1
        """The last version that an attempt ended for, well or not."""
        self._metrics = metrics
        self.accept(-1)

    def accept(self, version: int) -> None:
        """The pool knows that the replica serves `version`."""
        self.version = version
        self._metrics.set("weights/version", version, url=self.engine.url)

    async def bring(self, target: Target) -> None:
        """Update the engine to the target. WeightsError, EngineError or ServiceUnavailable when it failed."""
        began = time.perf_counter()
        await self.engine.stage_weights(target.path)
        staged = time.perf_counter()
        await self._swap(target.version)
        resumed = time.perf_counter()
        await self._verify(target.manifest.probe)
        self._metrics.observe("weights/stage_s", staged - began)
        self._metrics.observe("weights/pause_s", resumed - staged)
        self._metrics.observe("weights/update_s", time.perf_counter() - began)

    async def _swap(self, version: int) -> None:
        try:
            # Inside the block, since a pause whose answer was lost may have taken effect.
            await self.engine.pause()
            await self.engine.commit_weights(version)
        finally:
            await self.engine.resume()

    async def _verify(self, probe: Probe) -> None:
        answers = await self.engine.prompt_logprobs(probe.token_ids)
        differences = [abs(mine - theirs) for mine, theirs in zip(probe.logprobs, answers, strict=True)]
        worst = max(differences)
        self.mismatch = statistics.fmean(differences)
        self._metrics.set("weights/probe_max_abs", worst, url=self.engine.url)
        # Written so that a NaN fails.
        if not worst <= probe.tolerance:
            at = differences.index(worst)
            raise WeightsError(
                f"{self.engine.url}: logprob {answers[at]:.6g} of the probe's token {at + 1} differs from the "
                f"trainer's {probe.logprobs[at]:.6g} by more than {probe.tolerance:g}: the replica takes no calls "
                "until an update succeeds (weights.probe_tolerance sets the limit)"
            )
