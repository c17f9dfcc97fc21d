"""The trainer's metrics. Declared here, written by `trainer` and `loop`."""

from __future__ import annotations

from agentrl.core.telemetry import MetricSpec


def _step(name: str, help: str) -> MetricSpec:
    return MetricSpec(name, "step", help)


SPECS: tuple[MetricSpec, ...] = (
    _step("reward/mean", "Mean reward of the batch's scored attempts."),
    _step("reward/mean/SOURCE", "The same, of the tasks of one source."),
    _step("reward/std", "Standard deviation of the rewards."),
    _step("train/version", "Policy version whose weights the step started from."),
    _step("train/groups", "Groups trained on."),
    _step("train/flat_groups", "Groups whose rewards were all equal: no gradient."),
    _step("train/samples", "Trajectories trained on."),
    _step("train/tokens", "Tokens of the trajectories, prompts and tool results included."),
    _step("train/trained_tokens", "Tokens with a loss."),
    _step("train/dropped_samples", "Samples that the staleness sweep dropped since the last step."),
    _step("train/lag_mean", "Versions between sampling and training, mean over trained tokens."),
    _step("train/lag_max", "The largest lag of a trained token."),
    _step("train/loss", "Policy loss, mean over the step's minibatches."),
    _step("train/lr", "Learning rate of the step."),
    _step("train/grad_norm", "Gradient norm before clipping, mean over the minibatches."),
    _step("train/entropy_nats", "Entropy of the policy at trained tokens."),
    _step("train/advantage_mean_abs", "Mean |advantage| over samples."),
    _step("train/clip_fraction", "Share of tokens whose gradient the clip range took away."),
    _step("train/dual_clip_fraction", "Share of tokens at the dual clip's ceiling."),
    _step("train/tis_capped_fraction", "Share of tokens whose importance weight was truncated."),
    _step("train/ess_ratio", "Effective sample size of the importance weights over their number."),
    _step("train/chi2", "chi-squared divergence of proximal from behaviour policy."),
    _step("train/log_ratio_mean_abs", "Mean |current - proximal| logprob: how far the update moved."),
    _step("train/behavior_log_ratio_mean_abs", "Mean |proximal - behaviour| logprob: staleness and engine mismatch."),
    _step("train/nonfinite_ratio_tokens", "Tokens whose log-ratio was not finite; counted as ratio 1."),
    _step("train/mismatch_zero_lag_mean_abs", "Mean |trainer - engine| logprob at lag 0; 0 up to rounding."),
    _step("train/mismatch_zero_lag_max_abs", "The largest such difference."),
    _step("train/mismatch_zero_lag_tokens", "Tokens sampled by exactly the weights that the step started from."),
    _step("train/pack_fill", "Tokens over pack area: 1 is no padding."),
    _step("train/take_s", "Seconds waiting for the batch."),
    _step("train/train_s", "Seconds for the training step: prepare, proximal and update."),
    _step("train/prepare_s", "Seconds for advantages and packing."),
    _step("train/proximal_s", "Seconds for the forward pass before the update."),
    _step("train/update_s", "Seconds for forward, backward and optimizer."),
    _step("train/checkpoint_s", "Seconds to write the checkpoint."),
    _step("train/publish_s", "Seconds to write the new version's weights."),
    _step("train/apply_s", "Seconds until a replica served the new version, verified."),
    _step("weights/mismatch_mean_abs", "Mean |trainer - engine| logprob of what replicas sample by the new version."),
    _step("train/step_s", "Seconds of the whole step."),
    _step("train/warm_loss", "Cross-entropy of the warm start's step, nats a token."),
    _step("train/warm_accuracy", "Share of demonstrated tokens that are the model's first choice."),
)
