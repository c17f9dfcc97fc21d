"""One replica's update: stage, then pause, commit, resume, verify. Used by `updater`.

Invariant: a replica that was paused is resumed, whatever happened in between, and `swap` returns only after
the probe agreed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from agentrl.core.errors import WeightsError
from agentrl.core.protocols import Engine
from agentrl.core.telemetry import Metrics
from agentrl.core.types import Completion, GenerateRequest, Probe, Sampling, WeightManifest

SAMPLED_TOKENS = 32
"""Sampled after every update, to compare the serving path's log-probabilities with the trainer's."""


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
        self.sample: tuple[tuple[int, ...], Completion] | None = None
        """A prompt and what was sampled after it, under `version`."""
        self.attempted = -1
        """The last version that an attempt ended for, well or not."""
        self._metrics = metrics
        self.accept(-1)

    def accept(self, version: int) -> None:
        """The pool knows that the replica serves `version`."""
        self.version = version
        self._metrics.set("weights/version", version, url=self.engine.url)

    async def stage(self, target: Target) -> None:
        """Load the target beside the weights that serve. WeightsError, EngineError or ServiceUnavailable."""
        began = time.perf_counter()
        await self.engine.stage_weights(target.path)
        self._metrics.observe("weights/stage_s", time.perf_counter() - began)

    async def swap(self, target: Target) -> None:
        """Serve the staged weights, and verify them. Raises as `stage` does; the pool must not send calls meanwhile."""
        began = time.perf_counter()
        try:
            # Inside the block, since a pause whose answer was lost may have taken effect.
            await self.engine.pause()
            await self.engine.commit_weights(target.version)
        finally:
            await self.engine.resume()
        self._metrics.observe("weights/pause_s", time.perf_counter() - began)
        await self._verify(target.manifest.probe)
        self.sample = await self._sampled(target)
        self._metrics.observe("weights/verified_s", time.perf_counter() - began)

    async def _sampled(self, target: Target) -> tuple[tuple[int, ...], Completion]:
        ids = target.manifest.probe.token_ids
        prompt = ids[: max(1, len(ids) // 2)]
        request = GenerateRequest(
            request_id=f"probe-{target.version}-{uuid4().hex[:8]}", token_ids=prompt,
            sampling=Sampling(max_tokens=SAMPLED_TOKENS), cache_salt=f"v{target.version}",
        )  # fmt: skip
        return prompt, await self.engine.generate(request)

    async def _verify(self, probe: Probe) -> None:
        answers = await self.engine.prompt_logprobs(probe.token_ids)
        differences = [abs(mine - theirs) for mine, theirs in zip(probe.logprobs, answers, strict=True)]
        worst = max(differences)
        self._metrics.set("weights/probe_max_abs", worst, url=self.engine.url)
        # Written so that a NaN fails.
        if not worst <= probe.tolerance:
            at = differences.index(worst)
            raise WeightsError(
                f"{self.engine.url}: logprob {answers[at]:.6g} of the probe's token {at + 1} differs from the "
                f"trainer's {probe.logprobs[at]:.6g} by more than {probe.tolerance:g}: the replica takes no calls "
                "until an update succeeds (weights.probe_tolerance sets the limit)"
            )
