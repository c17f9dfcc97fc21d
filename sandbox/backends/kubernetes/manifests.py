"""The objects that the Kubernetes backend creates, as pure functions. Used by `backend`.

Invariant: whatever a template overrides, a pod keeps its name, its labels, its owner and its token, by which it is
found, cleaned up and reached.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sandbox.runtime
from agentrl.core.config import KubernetesConfig
from agentrl.core.types import SandboxSpec
from sandbox.backends.kubernetes.cluster import Object
from sandbox.runtime.hardening import UNHEARD
from sandbox.runtime.interpreter import PLACE, command

PORT = 4170
"""Where sandboxd serves in its pod."""
TOKEN = "SANDBOXD_TOKEN"
OWNER = "agentrl/owner"
RUNTIME = PLACE
"""Where a pod sees the runtime, read-only."""
CONTAINER = "sandbox"
FIRST_UID, UIDS = 200_000, 1_000_000_000
"""A sandbox has a uid of its own: the kernel counts processes by uid over all pods of a node."""
BROUGHT = f"{RUNTIME}/runtime"
"""Where a pod sees the Python that its init container brought, read-only, with the runtime in it."""
BRINGER, SOURCES = "runtime", "/run/sources"
"""That init container, and where it sees what it packs."""
BROUGHT_MB = 64
"""Most that it may be, beyond what the sandbox may use."""
START = "from sandbox.runtime.pod import main; main()"
PACK = f"from sandbox.runtime.interpreter import pack; pack({BROUGHT!r})"


def labels(controller: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "agentrl",
        "app.kubernetes.io/component": "sandbox",
        "agentrl/controller": controller,
    }


def selector(controller: str) -> str:
    return ",".join(f"{name}={value}" for name, value in labels(controller).items())


def owner_name(controller: str) -> str:
    return f"agentrl-{controller}"


def owner(controller: str) -> Object:
    """The ConfigMap that owns everything else: when it is deleted, the cluster collects all of it."""
    return _object("v1", "ConfigMap", owner_name(controller), controller, "") | {"data": {"controller": controller}}


def runtime(controller: str, owner_uid: str) -> Object:
    """The ConfigMap with the runtime's files, named by their content, since pods of another version keep theirs, and
    by its owner: that of an owner before is being collected."""
    folder = Path(sandbox.runtime.__file__).parent
    files = {f"sandbox.runtime.{path.stem}.py": path.read_text() for path in sorted(folder.glob("*.py"))}
    digest = hashlib.sha256(json.dumps([owner_uid, files]).encode()).hexdigest()[:12]
    made = _object("v1", "ConfigMap", f"agentrl-runtime-{controller}-{digest}", controller, owner_uid)
    return made | {"data": files, "immutable": True}


def program(config: KubernetesConfig, code: str, *, sealed: bool = False) -> list[str]:
    """The words that run `code` in a pod, beside the runtime; nothing that a task may write can stand in for that."""
    return command(BROUGHT, code, sealed=sealed) if config.runtime_image else _of_image(config, RUNTIME, code)


def _of_image(config: KubernetesConfig, sources: str, code: str) -> list[str]:
    return [config.python, "-I", "-B", "-c", f"import sys; sys.path.insert(0, {sources!r}); {code}"]


def network_policy(controller: str, owner_uid: str, config: KubernetesConfig) -> Object:
    """Nothing in but sandboxd's port, nothing out but what the configuration allows."""
    ingress: Object = {"ports": [{"protocol": "TCP", "port": PORT}]}
    if config.ingress_from:
        ingress["from"] = [dict(peer) for peer in config.ingress_from]
    made = _object("networking.k8s.io/v1", "NetworkPolicy", owner_name(controller), controller, owner_uid)
    return made | {
        "spec": {
            "podSelector": {"matchLabels": labels(controller)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [ingress],
            "egress": [dict(rule) for rule in config.egress],
        }
    }


def pod(
    name: str,
    spec: SandboxSpec,
    *,
    config: KubernetesConfig,
    owner_uid: str,
    runtime_map: Object,
    token: str,
    owner: str = "",
) -> Object:
    """One sandbox; `owner` is whose it is, for people who look for it."""
    made = _object("v1", "Pod", name, config.controller, owner_uid)
    if owner:
        made["metadata"]["annotations"] = {OWNER: owner}
        made["metadata"]["labels"][OWNER] = _as_label(owner)
    identity = {"metadata": made["metadata"]}
    sources: Object = {"configMap": _files(runtime_map)}
    volumes: list[Object] = [{"name": "runtime", **sources}]
    if config.runtime_image:
        volumes = [{"name": "sources", **sources}, {"name": "runtime", "emptyDir": {"sizeLimit": f"{BROUGHT_MB}Mi"}}]
    if config.user == "own":
        volume: Object = {"sizeLimit": f"{spec.limits.disk_mb}Mi"} | (
            {"medium": "Memory"} if _in_memory(config) else {}
        )
        volumes += [{"name": name, "emptyDir": volume} for name in _writable(spec)]
    made["spec"] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "activeDeadlineSeconds": config.max_age_s,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [_tolerated(taint, config.node_lost_s) for taint in ("not-ready", "unreachable")],
        "containers": [_container(name, spec, config, token)],
        "volumes": volumes,
    }
    if config.runtime_image:
        made["spec"]["initContainers"] = [_bringer(made["spec"]["containers"][0], config)]
    if config.runtime_class:
        made["spec"]["runtimeClassName"] = config.runtime_class
    template = json.loads(json.dumps(dict(config.template)))
    extra = template.get("spec", {}).pop("containers", [])
    merged = merge(made, template)
    for position, container in enumerate(extra):
        if position == 0:
            merged["spec"]["containers"][0] = merge(merged["spec"]["containers"][0], container)
        else:
            merged["spec"]["containers"].append(container)
    for what in ("initContainers", "volumes"):
        if what in made["spec"]:
            merged["spec"][what] = made["spec"][what] + template.get("spec", {}).get(what, [])
    whole: Object = merge(merged, identity)
    return whole


def merge(base: Any, over: Any) -> Any:
    """`over` wins; objects are merged, lists are replaced."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def _container(name: str, spec: SandboxSpec, config: KubernetesConfig, token: str) -> Object:
    runtime_config: Object = {"port": PORT, "workdir": spec.workdir, "ttl_s": spec.ttl_s, "env": dict(spec.env)}
    if _in_memory(config):
        runtime_config["volume_mb"] = spec.limits.disk_mb
    own = config.user == "own"
    if not own and not config.runtime_image:
        runtime_config["writable_image"] = True
    pids = spec.limits.pids if own else 0
    security: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts: list[Object] = [{"name": "runtime", "mountPath": RUNTIME, "readOnly": True}]
    if own:
        uid = FIRST_UID + int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) % UIDS
        security |= {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": uid, "readOnlyRootFilesystem": True}
        mounts += [{"name": volume, "mountPath": path} for volume, path in _writable(spec).items()]
    return {
        "name": CONTAINER,
        "image": spec.image or config.image,
        "imagePullPolicy": config.pull,
        "command": [*program(config, START), json.dumps(runtime_config), str(pids)],
        "env": [{"name": TOKEN, "value": token}, *_unheard(config)],
        "ports": [{"containerPort": PORT}],
        "resources": _resources(spec, config),
        "securityContext": security,
        "volumeMounts": mounts,
        # A runtime that cannot start has said why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _bringer(container: Object, config: KubernetesConfig) -> Object:
    """As the sandbox's own container, but for the image, and that it may write the runtime."""
    mounts = [
        {"name": "sources", "mountPath": SOURCES, "readOnly": True},
        {"name": "runtime", "mountPath": RUNTIME},
    ]
    shared = ("imagePullPolicy", "resources", "securityContext", "terminationMessagePolicy")
    return {
        "name": BRINGER,
        "image": config.runtime_image,
        "command": _of_image(config, SOURCES, PACK),
        "volumeMounts": mounts,
        **{field: container[field] for field in shared},
    }


def _unheard(config: KubernetesConfig) -> list[Object]:
    return [{"name": name, "value": ""} for name in UNHEARD] if config.runtime_image else []


def _resources(spec: SandboxSpec, config: KubernetesConfig) -> Object:
    limits, share = spec.limits, config.request_share
    # Files in memory count as memory of the container; they are paid from the disk limit.
    memory = limits.memory_mb + (limits.disk_mb if _in_memory(config) else 0)
    disk = limits.disk_mb + (BROUGHT_MB if config.runtime_image else 0)
    amounts = {"cpu": limits.cpus * 1000, "memory": memory, "ephemeral-storage": disk}
    units = {"cpu": "m", "memory": "Mi", "ephemeral-storage": "Mi"}
    return {
        "limits": {kind: f"{round(amount)}{units[kind]}" for kind, amount in amounts.items()},
        "requests": {kind: f"{max(1, round(amount * share))}{units[kind]}" for kind, amount in amounts.items()},
    }


def _in_memory(config: KubernetesConfig) -> bool:
    return config.user == "own" and config.disk == "tmpfs"


def _writable(spec: SandboxSpec) -> dict[str, str]:
    """Volume to path of what a sandbox may write."""
    return {"work": spec.workdir} if spec.workdir.rstrip("/") == "/tmp" else {"work": spec.workdir, "tmp": "/tmp"}


def _as_label(text: str) -> str:
    """The nearest that a label's value may be."""
    return re.sub(r"[^A-Za-z0-9._-]", ".", text)[:63].strip("._-")


def _files(runtime_map: Object) -> Object:
    """The ConfigMap's keys are module names; as files they are packages."""
    items = [
        {"key": key, "path": key.removesuffix(".py").replace(".", "/") + ".py"} for key in sorted(runtime_map["data"])
    ]
    return {"name": runtime_map["metadata"]["name"], "items": items, "defaultMode": 0o444}


def _tolerated(taint: str, seconds: int) -> Object:
    return {
        "key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds,
    }  # fmt: skip


def _object(version: str, kind: str, name: str, controller: str, owner_uid: str) -> Object:
    metadata: Object = {"name": name, "labels": labels(controller)}
    if owner_uid:
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner_name(controller), "uid": owner_uid}
        metadata["ownerReferences"] = [reference]
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
