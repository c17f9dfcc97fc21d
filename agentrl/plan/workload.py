"""What one step has to do: how many episodes, how long, and what their environment takes.

Sections of a plan file. Lengths are distributions, since a step waits for its longest episode; `mean` is the mean of
what is really generated, after the cap. Invariant: every sample lies between 0 and the cap.
"""

from __future__ import annotations

import math
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from agentrl.core.config import Section

_NORMAL = NormalDist()


class Settings(Section):
    """A section of a plan file: no number in it is infinite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Lengths(Settings):
    """A distribution of lengths (or of seconds). A bare number in a plan file is a fixed length."""

    kind: Literal["fixed", "lognormal", "empirical"] = "fixed"
    mean: float = Field(0.0, ge=0)
    """Of the values after the cap. Computed from `values` for an empirical distribution."""
    cap: float | None = Field(None, ge=0)
    """No value exceeds it; what would is cut there."""
    sigma: float = Field(1.0, gt=0, le=5)
    """Standard deviation of the logarithm (lognormal). Beyond 5 hardly any value is near the mean."""
    values: tuple[float, ...] = ()
    """Observed values (empirical)."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return {"kind": "fixed", "mean": given}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "empirical":
            if not self.values or min(self.values) < 0:
                raise ValueError("values: an empirical distribution needs values of at least 0")
            cut = [min(value, self.limit) for value in self.values]
            object.__setattr__(self, "mean", sum(cut) / len(cut))
        elif self.values:
            raise ValueError(f"values: only kind = 'empirical' takes them, not {self.kind!r}")
        if self.mean > self.limit:
            raise ValueError(f"mean: {self.mean:g} exceeds the cap of {self.limit:g}")
        return self

    @property
    def limit(self) -> float:
        return math.inf if self.cap is None else self.cap

    @cached_property
    def location(self) -> float:
        """mu of the lognormal whose mean after the cap is `mean`."""
        if self.mean <= 0:
            return -math.inf
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.mean) + 8 * self.sigma
        if self._mean_at(low) > self.mean:
            low -= 8 * self.sigma
        if self.cap is None:
            return math.log(self.mean) - self.sigma**2 / 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def _mean_at(self, mu: float) -> float:
        if self.cap is None or self.cap == 0:
            return math.exp(mu + self.sigma**2 / 2)
        edge = (math.log(self.cap) - mu) / self.sigma
        below = math.exp(mu + self.sigma**2 / 2) * _NORMAL.cdf(edge - self.sigma)
        return below + self.cap * (1 - _NORMAL.cdf(edge))

    @property
    def variance(self) -> float:
        """Of the values after the cap."""
        if self.kind == "fixed" or self.mean == 0:
            return 0.0
        if self.kind == "empirical":
            return sum((min(v, self.limit) - self.mean) ** 2 for v in self.values) / len(self.values)
        double = math.exp(2 * self.location + 2 * self.sigma**2)
        if self.cap is None:
            return double - self.mean**2
        edge = (math.log(self.cap) - self.location) / self.sigma
        square = double * _NORMAL.cdf(edge - 2 * self.sigma) + self.cap**2 * (1 - _NORMAL.cdf(edge))
        return max(square - self.mean**2, 0.0)

    def quantile(self, share: float) -> float:
        """The value that `share` of all values do not exceed."""
        if self.kind == "fixed" or self.mean == 0:
            return self.mean
        if self.kind == "empirical":
            ordered = sorted(self.values)
            return min(ordered[min(int(share * len(ordered)), len(ordered) - 1)], self.limit)
        if share >= 1:
            return self.limit
        return min(math.exp(self.location + self.sigma * _NORMAL.inv_cdf(max(share, 1e-12))), self.limit)

    def longest(self, count: float) -> float:
        """What the longest of `count` values is likely to be: the 1 - 1/count quantile."""
        return self.quantile(1 - 1 / count) if count > 1 else self.mean

    def longest_sum(self, terms: int, count: float) -> float:
        """What the longest of `count` sums of `terms` values is likely to be.

        The larger of two limits: one value that outgrows all others (heavy tails), and many that are somewhat large.
        """
        if terms == 1:
            return self.longest(count)
        jump = (terms - 1) * self.mean + self.longest(count * terms)
        spread = math.sqrt(terms * self.variance) * (_NORMAL.inv_cdf(1 - 1 / count) if count > 1 else 0.0)
        return min(max(jump, terms * self.mean + spread), terms * self.limit)


class Workload(Settings):
    prompts: int = Field(gt=0)
    """B: groups a step."""
    samples: int = Field(gt=0)
    """G: episodes a group."""
    prompt_tokens: Lengths = Lengths(mean=500)
    response_tokens: Lengths
    """Tokens the policy samples in one turn."""
    turns: int = Field(1, gt=0)
    """Turns an episode; each samples a response, and all but single-turn tasks run the environment after it."""
    tool_tokens: Lengths = Lengths()
    """Tokens the environment adds after each turn."""
    environment_s: Lengths = Lengths()
    """Seconds of environment (tests, tools) after each turn."""
    environment_cores: float = Field(1.0, gt=0)
    """CPU cores busy while the environment runs."""
    sandbox_cores: float | None = Field(None, gt=0)
    """CPU cores reserved for a sandbox; defaults to `environment_cores`."""
    turn_generation_s: float | None = Field(None, gt=0)
    """Seconds to sample one turn; by default the ledger's own decode time."""
    rollout_target_s: float | None = Field(None, gt=0)
    """Rollout is to take no longer than this. With `turn_generation_s`, the sandboxes are those that it takes."""
    reward_s: float = Field(0.0, ge=0)
    """CPU seconds to score one episode."""

    @model_validator(mode="after")
    def _samples_something(self) -> Self:
        if self.response_tokens.mean == 0:
            raise ValueError("response_tokens: a turn samples at least one token on average; at least 1")
        return self

    @property
    def episodes(self) -> int:
        """S = B x G."""
        return self.prompts * self.samples

    @property
    def sampled_tokens(self) -> float:
        """Tokens an episode's policy samples, on average."""
        return self.turns * self.response_tokens.mean

    @property
    def episode_tokens(self) -> float:
        """Tokens of a whole episode at its end, on average."""
        return self.prompt_tokens.mean + self.turns * (self.response_tokens.mean + self.tool_tokens.mean)

    @property
    def episode_pairs(self) -> float:
        """Pairs of query and key under a causal mask, of an average episode: E[n^2] / 2."""
        parts = ((1, self.prompt_tokens), (self.turns, self.response_tokens), (self.turns, self.tool_tokens))
        return (self.episode_tokens**2 + sum(count * part.variance for count, part in parts)) / 2
