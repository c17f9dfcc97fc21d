"""What a pod's status means for its sandbox, as pure functions. Used by `backend`.

Invariant: a pod has either ended, with a cause, or may still come to serve.
"""

from __future__ import annotations

from sandbox.backends.kubernetes.cluster import Object
from sandbox.backends.kubernetes.manifests import BRINGER, TOKEN
from sandbox.runtime.sandboxd import LEASE_ENDED

BROKEN = frozenset(
    {
        "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
        "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
    }
)  # fmt: skip
"""Reasons for which a container waits in vain."""
NO_PROGRAM = ("executable file not found", "no such file or directory")
"""As runc and its like word it."""
SAID = 400
"""Characters of a container's last words that a cause quotes."""
NODE_GONE = frozenset({"NodeLost", "NodeNotReady", "DeletionByTaintManager", "TaintManagerEviction"})
"""Reasons that mean: nobody is left on the node to confirm that the pod ended."""


def ended(pod: Object) -> str | None:
    """Why a pod will not serve any more; None while it may."""
    status = pod.get("status", {})
    reason = _reason(pod)
    if reason in NODE_GONE:
        return f"its node {node(pod)} is lost ({reason})"
    if status.get("phase") in ("Failed", "Succeeded"):
        return _cause(pod, reason)
    container = _container(pod)
    if "terminated" in container:
        return _terminated(container["terminated"])
    if "deletionTimestamp" in pod["metadata"]:
        return f"its pod was deleted by somebody else{f' ({reason})' if reason else ''}"
    if status.get("phase") == "Unknown":
        return f"its node {node(pod)} is lost"
    return None


def dead(pod: Object | None) -> bool | None:
    """True when nothing of a deleted pod runs any more, although its node may still be tidying up."""
    return pod is None or ("deletionTimestamp" in pod["metadata"] and "terminated" in _container(pod)) or None


def broken(pod: Object) -> str | None:
    """Why a pod's containers cannot start; None when nothing speaks against it."""
    for state in (_bringer(pod), _container(pod)):
        waiting = state.get("waiting", {})
        if waiting.get("reason") in BROKEN:
            return f"{waiting['reason']}: {waiting.get('message', 'no further reason given')}"
    return None


def lacks_interpreter(pod: Object) -> str | None:
    """What the container runtime says when an image has no such program to execute."""
    for state in (_bringer(pod), _container(pod)):
        message = str(state.get("terminated", {}).get("message", ""))
        if "exec" in message and any(sign in message for sign in NO_PROGRAM):
            return message
    return None


def unschedulable(pod: Object) -> str | None:
    """Why no node takes the pod."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", condition.get("reason", "")))
    return None


def address(pod: Object) -> str | None:
    """The IP at which its sandboxd serves or soon will; None while its container has not started."""
    ip = pod.get("status", {}).get("podIP")
    return ip if ip and "running" in _container(pod) else None


def token(pod: Object) -> str:
    """The bearer token of its sandboxd, which its manifest keeps: so the next controller finds it again."""
    environment = pod["spec"]["containers"][0].get("env", ())
    return next((entry["value"] for entry in environment if entry["name"] == TOKEN), "")


def node(pod: Object) -> str:
    return pod["spec"].get("nodeName") or "(none yet)"


def node_is_gone(pod: Object) -> bool:
    return _reason(pod) in NODE_GONE


def _container(pod: Object) -> Object:
    """State of the sandbox's container, the first of the pod."""
    return _state(pod, "containerStatuses", pod["spec"]["containers"][0]["name"])


def _bringer(pod: Object) -> Object:
    """State of the container that brings Python, where there is one."""
    return _state(pod, "initContainerStatuses", BRINGER)


def _state(pod: Object, kind: str, name: str) -> Object:
    for status in pod.get("status", {}).get(kind, ()):
        if status["name"] == name:
            return dict(status.get("state", {}))
    return {}


def _reason(pod: Object) -> str:
    """The pod's own reason, or else that of its disruption (since 1.26), or what its conditions come to (before)."""
    status = pod.get("status", {})
    if status.get("reason"):
        return str(status["reason"])
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    disruption = conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        return str(disruption.get("reason", ""))
    # A kubelet says both at once; only for a silent one somebody else says the first.
    ready = [conditions.get(kind, {}).get("status") for kind in ("Ready", "ContainersReady")]
    return "NodeNotReady" if "deletionTimestamp" in pod["metadata"] and ready == ["False", "True"] else ""


def _cause(pod: Object, reason: str) -> str:
    message = pod["status"].get("message", "")
    if reason == "Evicted":
        return f"its pod was evicted from {node(pod)}: {message}"
    if reason == "DeadlineExceeded":
        return "its pod reached sandbox.kubernetes.max_age_s"
    if reason:
        return f"its pod ended: {reason}: {message}"
    container, bringer = _container(pod), _bringer(pod).get("terminated", {})
    if bringer.get("exitCode"):
        return f"its Python was not brought by sandbox.kubernetes.runtime_image: {_terminated(bringer)}"
    return _terminated(container["terminated"]) if "terminated" in container else f"its pod ended: {message}"


def _terminated(state: Object) -> str:
    if state.get("reason") == "OOMKilled":
        return "its pod ran out of memory (OOMKilled)"
    if state.get("exitCode") == LEASE_ENDED:
        return "the lease ended"
    said = str(state.get("message", "")).strip()[-SAID:]
    return (
        f"its container ended with {state.get('exitCode')} ({state.get('reason', 'no reason')}){said and f': {said}'}"
    )
