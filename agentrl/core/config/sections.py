"""The sections of a run's configuration, one a room. Each room is handed its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.core.types import Limits, Sampling


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EnvConfig(Section):
    name: str = "vault"
    """Plugin name, or `package.module:Class`."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""


class AgentConfig(Section):
    name: str = "tool_loop"
    options: Mapping[str, Any] = Field(default_factory=dict)


class TinyModelConfig(Section):
    """Shape of the model that `agentrl model init` builds when no `model.path` is given."""

    vocab_size: int = Field(640, gt=260)
    hidden: int = Field(64, gt=0)
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(2, gt=0)
    context: int = Field(768, gt=0)
    """Longest sequence, in tokens."""


class ModelConfig(Section):
    path: str = ""
    """Folder of a Hugging Face causal LM; empty builds a tiny one from `tiny`."""
    renderer: str = "qwen3"
    """Renderer of the `renderers` package; `auto` resolves by the model's name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    tiny: TinyModelConfig = TinyModelConfig()


class WarmStartConfig(Section):
    """Supervised steps on the environment's demonstrations before any reinforcement learning."""

    steps: int = Field(400, ge=0)
    batch: int = Field(32, gt=0)
    """Episodes a step."""
    lr: float = Field(4e-3, gt=0)
    noise: float = Field(0.4, ge=0, le=1)
    """Share of bad moves in the demonstrations."""
    threads: int = Field(2, gt=0)
    """CPU threads; nothing else runs at that time."""


class EngineConfig(Section):
    kind: Literal["embedded", "vllm"] = "embedded"
    replicas: int = Field(1, gt=0)
    urls: tuple[str, ...] = ()
    """Base URLs of engines that run elsewhere; empty starts `replicas` embedded ones."""
    max_rows: int = Field(128, gt=0)
    """Sequences decoded together; more wait."""
    cache_rows: int = Field(256, gt=0)
    """Sequences whose KV is kept, running ones included."""
    context: int = Field(0, ge=0)
    """Longest prompt + completion, in tokens; 0 means what the model allows. KV memory grows with rows x context."""
    threads: int = Field(1, gt=0)
    """CPU threads of one replica."""


class GatewayConfig(Section):
    url: str = ""
    """Base URL of a gateway that runs elsewhere; empty starts one."""
    max_attempts: int = Field(8, gt=0)
    """Tries of one call over replicas before it fails."""
    call_timeout_s: float = Field(120.0, gt=0)
    keep_s: float = Field(3600.0, gt=0)
    """How long a session's calls stay in gateway.db after its `wall_s` has passed; the buffer has its own copy."""


class DockerConfig(Section):
    """How `sandbox.backend = "docker"` places sandboxes."""

    host: str = ""
    """URL of the engine, e.g. `unix:///run/docker.sock`; empty means DOCKER_HOST, or else the default."""
    way_in: Literal["auto", "socket", "exec"] = "auto"
    """How commands come in. `socket`: over a socket mounted from here. `exec`: by the engine's exec API,
    which is slower. `auto`: the first where the engine is on a unix socket, else the second."""
    image: str = ""
    """Image of sandboxes whose spec names none."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that the engine lacks is pulled."""
    prefetch: tuple[str, ...] = ()
    """Images to pull when the controller starts."""
    builds: Mapping[str, str] = Field(default_factory=dict)
    """Images that are built here: names, as specs use them, to folders with a Dockerfile. Built when the controller
    starts or a sandbox needs it, and again when the folder has changed."""
    runtime: str = ""
    """An OCI runtime that the engine knows by name; empty means the engine's default."""
    users: bool = True
    """Whether commands may run as other users of the image: sandboxd alone then has SETUID, SETGID and KILL.
    Commands have no capability either way."""
    network: str = "none"
    """A network of the engine, which decides what sandboxes reach; `none` is no network at all."""
    disk: Literal["tmpfs", "quota", "unlimited"] = "tmpfs"
    """What `limits.disk_mb` is: `tmpfs`: workdir and /tmp, each, everything else being read-only; `quota`: the
    container's writable layer, where the storage driver can; `unlimited`: a writable layer without a limit."""
    start_timeout_s: float = Field(60.0, gt=0)
    """Longest time from a container's start to a serving sandbox."""


class KubernetesConfig(Section):
    """How `sandbox.backend = "kubernetes"` places sandboxes."""

    kubeconfig: str = ""
    """Path; empty means the pod's service account when the controller runs in one, or else ~/.kube/config."""
    context: str = ""
    """Of the kubeconfig; empty means its current one."""
    namespace: str = "agentrl-sandboxes"
    """Holds sandboxes only; must exist."""
    controller: str = Field("default", pattern=r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$")
    """Labels this controller's objects: controllers with other names leave them alone."""
    image: str = ""
    """Image of sandboxes whose spec names none."""
    runtime_image: str = ""
    """An image with a Python of 3.7 or newer, for the same processor, that an init container brings into each pod.
    Empty: no init container, and the images of sandboxes need such a Python themselves."""
    python: str = "python3"
    """The interpreter inside the images that have one, looked up in their PATH."""
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    runtime_class: str = ""
    """A RuntimeClass of the cluster, e.g. for gVisor; empty means the cluster's default."""
    user: Literal["own", "image"] = "own"
    """`own`: a uid of its own, a read-only root, and `disk_mb` for the workdir and /tmp each. `image`: the image's
    user and a writable root; what the image has in the workdir stays, and `pids` is not limited."""
    disk: Literal["tmpfs", "node"] = "tmpfs"
    """What holds the workdir and /tmp when `user` is `own`. `tmpfs`: memory of the pod, where a write beyond `disk_mb`
    fails; Kubernetes 1.22 and newer. `node`: the node's disk, where the kubelet evicts a sandbox beyond `disk_mb` some
    time later."""
    request_share: float = Field(0.25, gt=0, le=1)
    """Share of a sandbox's limits that the scheduler reserves for it."""
    egress: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicy egress rules; empty means none."""
    ingress_from: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicy peers that may reach sandboxd; empty means all, who then still need its token."""
    way_in: Literal["auto", "ip", "exec"] = "auto"
    """How commands come in: at a pod's IP, or through the API server's exec, which is slower and its server's load.
    `auto` is by IP until the network says that there is no way."""
    template: Mapping[str, Any] = Field(default_factory=dict)
    """Partial pod merged over ours; its first container is merged into the sandbox's, further ones are added."""
    max_age_s: int = Field(86_400, gt=0)
    """activeDeadlineSeconds: the cluster ends a sandbox of this age whoever renews it."""
    node_lost_s: int = Field(30, ge=0)
    """How long a node may be silent before its sandboxes are lost."""
    start_s: float = Field(120.0, gt=0)
    """Longest time from a pod's creation to a serving sandbox."""
    unschedulable_s: float = Field(10.0, ge=0)
    """How long no node may take a pod before its creation is refused with CAPACITY."""


class TenantConfig(Section):
    weight: float = Field(1.0, gt=0)
    """Share of the capacity while several tenants want more than there is."""
    quota: int = Field(0, ge=0)
    """Most live sandboxes; 0 means as many as there is room for."""


class SandboxConfig(Section):
    backend: Literal["local", "docker", "kubernetes"] = "local"
    url: str = ""
    """Base URL of a controller that runs elsewhere; empty starts one."""
    capacity: int = Field(512, gt=0)
    """Live sandboxes; one more is refused with CAPACITY."""
    warm: int = Field(0, ge=0)
    """Sandboxes kept ready of each of the newest shapes (specs without files) that were asked for."""
    tenants: Mapping[str, TenantConfig] = Field(default_factory=dict)
    """By tenant, the part of `owner` before a slash; `default` is for those not named."""
    leader_lease_s: float = Field(0.0, ge=0)
    """With several controllers on one store: seconds after which a silent leader is replaced, e.g. 30. 0 means that
    there is one controller, which leads at once."""
    advertise: str = ""
    """URL at which clients reach this controller, told by its standbys; by default its host and port."""
    require_isolation: bool = False
    """Refuse to start where the kernel allows no namespaces, instead of warning."""
    require_cgroups: bool = False
    """On `local`, refuse to start where limits do not hold for a sandbox as a whole, instead of warning."""
    egress: tuple[str, ...] = ()
    """What sandboxes reach through the controller's proxy although they have no network: `host:port`, `*.domain:port`,
    `address:port`; empty is nothing. On `kubernetes` see `kubernetes.egress`."""
    docker: DockerConfig = DockerConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()


class RewardConfig(Section):
    url: str = ""
    concurrency: int = Field(64, gt=0)
    timeout_s: float = Field(30.0, gt=0)


class RolloutConfig(Section):
    form: Literal["sync", "one_step", "async"] = "async"
    groups: int = Field(16, gt=0)
    """B, the groups of one training step."""
    group_size: int = Field(8, gt=1)
    """G, the attempts at one task."""
    max_lag: int = Field(2, ge=0)
    """Largest lag, in policy versions, at which a sample may still be trained on. `sync` implies 0, `one_step` 1."""
    concurrency: int = Field(128, gt=0)
    """Episodes in flight."""
    at_limit: Literal["wait", "drop"] = "wait"
    min_scored: int = Field(2, gt=1)
    """Scored attempts a group needs."""
    reissues: int = Field(2, ge=0)
    """New tries of an attempt that failed by `infra`."""
    resample_flat: bool = True
    """Replace groups whose rewards are all equal (DAPO), up to `flat_limit` for each group of a batch."""
    flat_limit: int = Field(1, ge=0)
    keep_steps: int = Field(50, gt=0)
    """Committed steps whose episodes stay whole in rollout.db; of older ones the facts stay, without tokens and
    messages. At least as many as the kept checkpoints span."""
    limits: Limits = Limits(turns=6, tokens=640, wall_s=60.0)
    sampling: Sampling = Sampling(max_tokens=48)
    no_progress_s: float = Field(180.0, gt=0)
    """A run in which no episode ends for this long stops with NO_PROGRESS."""
    trainer_wait_s: float = Field(3600.0, gt=0)
    """The same, while every episode waits for the trainer to take its step."""

    @property
    def lag_limit(self) -> int:
        """The staleness limit that the form implies."""
        return {"sync": 0, "one_step": 1, "async": self.max_lag}[self.form]


class LossConfig(Section):
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float = Field(3.0, gt=1)
    correction: Literal["token_tis", "none"] = "token_tis"
    """How samples of older versions are weighted; `none` is refused when the lag limit is above 0."""
    tis_cap: float = Field(2.0, gt=0)
    proximal: Literal["recompute", "loglinear", "behavior"] = "recompute"
    aggregation: Literal["token", "sequence", "constant"] = "token"
    constant_tokens: int = Field(256, gt=0)
    """L_max, by which `aggregation = "constant"` divides each session's loss."""


class TrainConfig(Section):
    steps: int = Field(40, gt=0)
    lr: float = Field(8e-4, gt=0)
    lr_final: float = Field(0.1, ge=0, le=1)
    """Share of `lr` that is left at the last step; it falls linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    minibatches: int = Field(2, gt=0)
    """Optimizer steps a training step."""
    advantage: Literal["grpo", "rloo"] = "grpo"
    loss: LossConfig = LossConfig()
    pack_tokens: int = Field(8192, gt=0)
    """Token budget of one packed forward pass."""
    checkpoint_every: int = Field(1, gt=0)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, gt=0)
    threads: int = Field(1, gt=0)


class WeightsConfig(Section):
    probe_tolerance: float = Field(1e-4, gt=0)
    """Largest |logprob difference| between trainer and replica on the probe."""
    keep: int = Field(3, gt=1)
    """Published versions kept on disk."""
    deadline_s: float = Field(120.0, gt=0)
    """How long a version may take to reach at least one replica."""


class EvalConfig(Section):
    tasks: int = Field(128, ge=0)
    """Held-out tasks; 0 skips the evaluations before and after."""
    temperature: float = Field(1.0, ge=0)
    every: int = Field(0, ge=0)
    """Steps between evaluations while training; 0 for none."""


class StoreConfig(Section):
    url: str = ""
    """SQLAlchemy URL (`postgresql+asyncpg://...`); empty means one SQLite file a room in the run's folder."""


class LaunchConfig(Section):
    restarts: int = Field(20, ge=0)
    """Restarts of one process before the run gives up."""
    live: bool = True
    """Show the live view when stdout is a terminal."""


class TelemetryConfig(Section):
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    tensorboard: bool = True
