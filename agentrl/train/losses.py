"""The policy loss and its diagnostics, one function a formula. Called by `trainer`; pure.

All tensors are fp32 of shape [N], N the trained tokens of the packs at hand, and log-probabilities are
natural. Invariant: an excluded value is replaced with `where`, never multiplied by 0, so that a NaN in it
cannot reach the loss or a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clipped to this before exp; e^20 is far above any cap in use."""


def token_tis(proximal: Tensor, behavior: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance weight of each token, w = min(exp(clip(prox - beh, +-20)), C), and where it was finite.

    Fu et al. 2025, "AReaL" (arXiv 2505.24298), the decoupled objective's first factor, truncated as in
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).
    A log-ratio that is not finite counts as 0 (w = 1).
    """
    ratio = (proximal - behavior).detach().float()
    finite = torch.isfinite(ratio)
    safe = torch.where(finite, ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return safe.exp().clamp(max=cap), finite


def loglinear_proximal(current: Tensor, behavior: Tensor, versions: Tensor, produced: int) -> Tensor:
    """Proximal logprobs without a forward pass: beh + a (sg(cur) - beh), a = (v_cur - 1 - v_beh) / (v_cur - v_beh).

    `produced` is v_cur, the version that the step under way produces; `versions` [N] are those that sampled.
    At lag 0, a is 0. A-3PO (arXiv 2512.06547), equation 6.
    """
    lag = (produced - versions).float()
    share = ((lag - 1.0) / lag.clamp(min=1.0)).clamp(0.0, 1.0)
    return behavior + share * (current.detach() - behavior)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per-token PPO losses [N] and what clipping did to them."""

    losses: Tensor
    ratio: Tensor
    """exp(cur - prox), detached."""
    clipped: Tensor
    """bool: the clip range took the gradient away."""
    dual_clipped: Tensor
    """bool: the dual clip did."""
    finite: Tensor
    """bool: the log-ratio was finite; where it wasn't, the token has ratio 1 and no gradient."""


def ppo_clip(
    current: Tensor, proximal: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(cur - prox); for A < 0 at most c |A|.

    PPO: Schulman et al. 2017 (arXiv 1707.06347), equation 7; the asymmetric range ("clip-higher"): Yu et al. 2025,
    "DAPO" (arXiv 2503.14476), equation 8; dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.
    """
    log_ratio = current - proximal.detach()
    finite = torch.isfinite(log_ratio)
    ratio = torch.where(finite, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(plain, bounded)
    ceiling = dual_clip * advantages.abs()
    dual = (advantages < 0) & (losses > ceiling)
    losses = torch.where(dual, ceiling, losses)
    clipped = (bounded > plain).detach() & ~dual
    return Surrogate(losses, ratio.detach(), clipped, dual.detach(), finite)


def token_weights(
    kind: Literal["token", "sequence", "constant"], session_tokens: Tensor, *, constant_tokens: int
) -> Tensor:
    """What each token's loss is multiplied by before the sum, [N]; every token of the minibatch must be in.

    `session_tokens` [N] is the number of trained tokens of the token's whole session, so a session's weight
    doesn't depend on how many trajectories it was split into.
    token: 1/N (DAPO, equation 8). sequence: mean over sessions of their means (DeepSeekMath, equation 3).
    constant: 1/(sessions x L_max): Liu et al. 2025, "Dr. GRPO" (arXiv 2503.20783).
    """
    each = 1.0 / session_tokens.float()
    if kind == "token":
        return torch.full_like(each, 1.0 / len(each))
    sessions = each.sum()
    if kind == "sequence":
        return each / sessions
    return torch.full_like(each, 1.0 / constant_tokens) / sessions


def weighted_sum(losses: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """Sum over the tokens that `kept` (bool) leaves; `weights` were normalised before it rejected anything."""
    return torch.where(kept, losses * weights, 0.0).sum()


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one token has them all. Kish 1965."""
    total, squares = weights.double().sum(), weights.double().square().sum()
    return float(total.square() / (squares * len(weights)))


def chi_squared(log_ratio: Tensor) -> float:
    """chi2 divergence estimate, mean(rho^2) - 1, of the untruncated ratio."""
    return float((2.0 * log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp().mean() - 1.0)
