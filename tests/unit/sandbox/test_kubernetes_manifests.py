"""What pods are made of, and what their states mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import KubernetesConfig
from agentrl.core.types import SandboxLimits, SandboxSpec
from sandbox.backends.kubernetes import manifests, pods

CONFIG = KubernetesConfig(image="python", controller="c1")


def made(config: KubernetesConfig = CONFIG, spec: SandboxSpec | None = None, name: str = "sb-1") -> dict[str, Any]:
    runtime = manifests.runtime(config.controller, "uid-1")
    return manifests.pod(
        name, spec or SandboxSpec(), config=config, owner_uid="uid-1", runtime_map=runtime, token="secret"
    )


def test_a_pod_holds_no_credentials_and_no_privileges() -> None:
    spec = made()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == CONFIG.max_age_s
    assert "runtimeClassName" not in spec
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["allowPrivilegeEscalation"], security["runAsNonRoot"]) == (False, True)
    assert security["readOnlyRootFilesystem"] is True


def test_every_sandbox_has_a_uid_of_its_own() -> None:
    uids = {made(name=f"sb-{i}")["spec"]["containers"][0]["securityContext"]["runAsUser"] for i in range(100)}
    assert len(uids) == 100
    assert min(uids) >= manifests.FIRST_UID


def test_limits_are_the_specs_and_requests_a_share_of_them() -> None:
    spec = SandboxSpec(limits=SandboxLimits(memory_mb=1000, cpus=0.5, disk_mb=400))
    pod = made(CONFIG.model_copy(update={"request_share": 0.1, "disk": "node"}), spec)
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "500m", "memory": "1000Mi", "ephemeral-storage": "400Mi"}
    assert resources["requests"] == {"cpu": "50m", "memory": "100Mi", "ephemeral-storage": "40Mi"}
    assert [volume.get("emptyDir") for volume in pod["spec"]["volumes"][1:]] == [{"sizeLimit": "400Mi"}] * 2


def test_files_in_memory_are_paid_from_the_disk_limit() -> None:
    spec = SandboxSpec(limits=SandboxLimits(memory_mb=1000, cpus=0.5, disk_mb=400))
    pod = made(CONFIG, spec)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1400Mi"
    volumes = [volume.get("emptyDir") for volume in pod["spec"]["volumes"][1:]]
    assert volumes == [{"sizeLimit": "400Mi", "medium": "Memory"}] * 2


def test_the_images_user_keeps_the_images_files() -> None:
    container = made(CONFIG.model_copy(update={"user": "image"}))["spec"]["containers"][0]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [manifests.RUNTIME]
    assert Path(manifests.RUNTIME).parent == Path("/"), "a task may move folders, but no mount"
    assert "runAsUser" not in container["securityContext"]


@pytest.mark.parametrize(("user", "writable"), [("own", False), ("image", True)])
def test_the_runtime_is_told_whether_tasks_may_write_the_image(user: str, writable: bool) -> None:
    command = made(CONFIG.model_copy(update={"user": user}))["spec"]["containers"][0]["command"]
    assert json.loads(command[5]).get("writable_image", False) is writable


def test_python_is_brought_by_an_init_container_that_may_do_no_more_than_the_sandbox() -> None:
    config = CONFIG.model_copy(update={"runtime_image": "with-python", "template": {"spec": {"initContainers": [{}]}}})
    spec = made(config)["spec"]
    ours, theirs = spec["initContainers"]
    (container,) = spec["containers"]
    assert (ours["image"], container["image"], theirs) == ("with-python", "python", {})
    assert ours["securityContext"] == container["securityContext"]
    assert ours["resources"] == container["resources"]
    assert "env" not in ours, "nothing of the token"
    (read,) = (mount for mount in container["volumeMounts"] if mount["name"] == "runtime")
    (write,) = (mount for mount in ours["volumeMounts"] if mount["name"] == "runtime")
    assert (read["readOnly"], write.get("readOnly")) == (True, None)
    assert {"name": "LD_PRELOAD", "value": ""} in container["env"]
    assert container["command"][0].startswith(manifests.BROUGHT)
    assert container["resources"]["limits"]["ephemeral-storage"] == f"{256 + manifests.BROUGHT_MB}Mi"
    assert "initContainers" not in made()["spec"]


def test_a_template_overrides_all_but_a_pods_identity() -> None:
    template = {
        "metadata": {"name": "mine", "labels": {"agentrl/controller": "mine", "team": "a"}},
        "spec": {
            "nodeSelector": {"pool": "sandboxes"},
            "volumes": [{"name": "data"}],
            "containers": [{"resources": {"limits": {"cpu": "2"}}}, {"name": "sidecar"}],
        },
    }
    config = CONFIG.model_copy(update={"template": template, "runtime_class": "gvisor"})
    pod = made(config)
    assert pod["metadata"]["name"] == "sb-1"
    assert pod["metadata"]["labels"] == {**manifests.labels("c1"), "team": "a"}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert pod["spec"]["nodeSelector"] == {"pool": "sandboxes"}
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["runtime", "work", "tmp", "data"]
    ours, sidecar = pod["spec"]["containers"]
    assert (ours["resources"]["limits"]["cpu"], ours["resources"]["limits"]["memory"]) == ("2", "768Mi")
    assert sidecar == {"name": "sidecar"}
    assert pods.token(pod) == "secret"
    assert template["spec"]["containers"], "the configuration is not changed"


def test_whose_a_pod_is_can_be_read_and_selected_by() -> None:
    runtime = manifests.runtime("c1", "uid-1")
    pod = manifests.pod(
        "sb-1",
        SandboxSpec(),
        config=CONFIG,
        owner_uid="u",
        runtime_map=runtime,
        token="t",
        owner=f"team/run 1:{'x' * 99}",
    )
    assert pod["metadata"]["annotations"]["agentrl/owner"] == f"team/run 1:{'x' * 99}"
    assert pod["metadata"]["labels"]["agentrl/owner"] == f"team.run.1.{'x' * 52}"
    assert "annotations" not in made()["metadata"]


def test_the_runtime_is_whole_and_named_by_its_content() -> None:
    runtime = manifests.runtime("c1", "uid-1")
    assert runtime == manifests.runtime("c1", "uid-1")
    assert {"sandbox.runtime.pod.py", "sandbox.runtime.sandboxd.py"} <= set(runtime["data"])
    assert len(json.dumps(runtime)) < 1 << 20, "a ConfigMap holds at most 1 MiB"
    paths = {item["path"] for item in made()["spec"]["volumes"][0]["configMap"]["items"]}
    assert "sandbox/runtime/pod.py" in paths


def test_the_network_policy_lets_in_only_to_the_runtime_and_nothing_out() -> None:
    spec = manifests.network_policy("c1", "uid-1", CONFIG)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": manifests.PORT}]}]
    peer = {"podSelector": {"matchLabels": {"app": "controller"}}}
    narrow = manifests.network_policy("c1", "uid-1", CONFIG.model_copy(update={"ingress_from": (peer,)}))["spec"]
    assert narrow["ingress"][0]["from"] == [peer]


def ready(kind: str, status: str) -> dict[str, str]:
    return {"type": kind, "status": status}


@pytest.mark.parametrize(
    ("metadata", "status", "cause"),
    [
        ({}, {"phase": "Running"}, None),
        ({}, {"phase": "Pending"}, None),
        ({"deletionTimestamp": "now"}, {"phase": "Running"}, "its pod was deleted by somebody else"),
        (
            {"deletionTimestamp": "now"},
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
            "its pod was deleted by somebody else (EvictionByEvictionAPI)",
        ),
        (
            {"deletionTimestamp": "now"},
            {"conditions": [ready("Ready", "False"), ready("ContainersReady", "True")]},
            "its node n is lost (NodeNotReady)",
        ),
        ({}, {"conditions": [ready("Ready", "False"), ready("ContainersReady", "True")]}, None),
        ({}, {"phase": "Failed", "reason": "Evicted", "message": "disk"}, "its pod was evicted from n: disk"),
        ({}, {"phase": "Unknown"}, "its node n is lost"),
        (
            {},
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    {"name": "runtime", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no"}}}
                ],
            },
            "its Python was not brought by sandbox.kubernetes.runtime_image: its container ended with 1 (Error): no",
        ),
    ],
)
def test_why_a_pod_ended(metadata: dict[str, str], status: dict[str, Any], cause: str | None) -> None:
    pod = made()
    pod["metadata"] |= metadata
    pod["spec"]["nodeName"] = "n"
    pod["status"] = status
    assert pods.ended(pod) == cause
