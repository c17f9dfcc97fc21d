"""The configuration of a run: one tree, read from TOML, overridden on the command line as `section.key=value`.

Read by `agentrl.cli` and `agentrl.launch`, which hand each room its own section. Invariant: a config that
exists is one that can run; unknown keys are refused with the nearest key named.
"""

from agentrl.core.config.run import RunConfig, changed_settings, dump_toml, known_keys, load_config, parse_config
from agentrl.core.config.sections import (
    AgentConfig,
    DockerConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    GatewayConfig,
    KubernetesConfig,
    LaunchConfig,
    LossConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    Section,
    StoreConfig,
    TelemetryConfig,
    TenantConfig,
    TinyModelConfig,
    TrainConfig,
    WarmStartConfig,
    WeightsConfig,
)

__all__ = [
    "AgentConfig",
    "DockerConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "GatewayConfig",
    "KubernetesConfig",
    "LaunchConfig",
    "LossConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "Section",
    "StoreConfig",
    "TelemetryConfig",
    "TenantConfig",
    "TinyModelConfig",
    "TrainConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "changed_settings",
    "dump_toml",
    "known_keys",
    "load_config",
    "parse_config",
]
