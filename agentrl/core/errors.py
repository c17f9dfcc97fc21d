"""Every error of agentrl, as one tree. Raised by all rooms; carried over HTTP as one envelope.

    AgentRLError
    ├── ConfigError            CONFIG               a setting is wrong; names the key and the nearest valid one
    ├── PluginError            PLUGIN               an environment or agent cannot be loaded
    ├── RequestError           BAD_REQUEST          a request to a service is malformed
    ├── Unauthorized           UNAUTHORIZED         the token or session key is unknown
    ├── NotFound               NOT_FOUND            no such object
    ├── Conflict               CONFLICT             same idempotency key, other body; or a lost compare-and-set
    ├── ServiceUnavailable     UNAVAILABLE          a service could not be reached, or did not answer
    ├── EngineError            ENGINE               the engine failed a call
    │   └── ContextOverflow    CONTEXT_OVERFLOW     the prompt leaves no room in the context
    ├── GatewayError           GATEWAY              the gateway failed a call
    │   ├── SessionSealed      SESSION_SEALED       the session takes no more calls
    │   └── LimitReached       LIMIT_REACHED        the session used up its calls, turns, tokens or time
    ├── SandboxError           SANDBOX              a command or file operation could not be carried out
    │   ├── CapacityError      CAPACITY             no room for another sandbox now; retry after `retry_after_s`
    │   ├── SandboxLost        SANDBOX_LOST         the sandbox is gone, with the cause
    │   ├── SandboxFileError   SANDBOX_FILE         a path inside the sandbox is missing or refused
    │   └── Unsupported        UNSUPPORTED          this backend cannot do that
    ├── RolloutError           ROLLOUT              the rollout cannot go on
    │   └── NoProgress         NO_PROGRESS          nothing moved until the deadline; says what it waits for
    ├── TrainError             TRAIN                the trainer cannot take the step
    ├── WeightsError           WEIGHTS              weights do not match their manifest, or a replica refused them
    └── LaunchError            LAUNCH               a process of the run ended, or could not be started

Each error says where, what was lost and what to do, and carries four facts that callers act on:
`code` (stable word), `blame` (who caused it), `ran` (whether the side effect happened) and `retryable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar


class Blame(StrEnum):
    """Who caused a failure. Unknown means `INFRA`."""

    INFRA = "infra"
    AGENT = "agent"
    CALLER = "caller"


class Ran(StrEnum):
    """Whether the operation's side effect happened. `MAYBE` is never retried blindly."""

    NO = "no"
    MAYBE = "maybe"
    YES = "yes"


class AgentRLError(Exception):
    """Base of the tree. Class attributes are the defaults of each branch; keywords override them per instance."""

    code: ClassVar[str] = "INTERNAL"
    blame: Blame = Blame.INFRA
    ran: Ran = Ran.MAYBE
    retryable: bool = False
    status: ClassVar[int] = 500
    """HTTP status that the envelope travels with."""

    def __init__(
        self,
        message: str,
        *,
        blame: Blame | None = None,
        ran: Ran | None = None,
        retryable: bool | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.blame = blame or type(self).blame
        self.ran = ran or type(self).ran
        self.retryable = type(self).retryable if retryable is None else retryable
        self.detail: dict[str, Any] = dict(detail or {})

    def envelope(self) -> dict[str, Any]:
        """The one JSON error shape of every service; also what OpenAI clients expect to find under `error`."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error" if self.status < 500 else "server_error",
                "code": self.code,
                "blame": self.blame.value,
                "ran": self.ran.value,
                "retryable": self.retryable,
                "detail": self.detail,
            }
        }


class ConfigError(AgentRLError):
    code = "CONFIG"
    blame, ran, status = Blame.CALLER, Ran.NO, 400


class PluginError(AgentRLError):
    code = "PLUGIN"
    blame, ran, status = Blame.CALLER, Ran.NO, 400


class RequestError(AgentRLError):
    code = "BAD_REQUEST"
    blame, ran, status = Blame.CALLER, Ran.NO, 400


class Unauthorized(AgentRLError):
    code = "UNAUTHORIZED"
    blame, ran, status = Blame.CALLER, Ran.NO, 401


class NotFound(AgentRLError):
    code = "NOT_FOUND"
    blame, ran, status = Blame.CALLER, Ran.NO, 404


class Conflict(AgentRLError):
    code = "CONFLICT"
    blame, ran, status = Blame.CALLER, Ran.NO, 409


class ServiceUnavailable(AgentRLError):
    code = "UNAVAILABLE"
    ran, retryable, status = Ran.MAYBE, True, 503


class EngineError(AgentRLError):
    code = "ENGINE"
    retryable, status = True, 502


class ContextOverflow(EngineError):
    code = "CONTEXT_OVERFLOW"
    blame, ran, retryable, status = Blame.AGENT, Ran.NO, False, 400


class GatewayError(AgentRLError):
    code = "GATEWAY"


class SessionSealed(GatewayError):
    code = "SESSION_SEALED"
    blame, ran, status = Blame.CALLER, Ran.NO, 409


class LimitReached(GatewayError):
    code = "LIMIT_REACHED"
    blame, ran, status = Blame.AGENT, Ran.NO, 403


class SandboxError(AgentRLError):
    code = "SANDBOX"


class CapacityError(SandboxError):
    code = "CAPACITY"
    ran, retryable, status = Ran.NO, True, 503

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait before asking again."""
        return float(self.detail.get("retry_after_s", 1.0))


class SandboxLost(SandboxError):
    code = "SANDBOX_LOST"
    ran, status = Ran.MAYBE, 410


class SandboxFileError(SandboxError):
    code = "SANDBOX_FILE"
    blame, ran, status = Blame.AGENT, Ran.NO, 404


class Unsupported(SandboxError):
    code = "UNSUPPORTED"
    blame, ran, status = Blame.CALLER, Ran.NO, 501


class RolloutError(AgentRLError):
    code = "ROLLOUT"


class NoProgress(RolloutError):
    code = "NO_PROGRESS"
    ran = Ran.NO


class TrainError(AgentRLError):
    code = "TRAIN"
    ran = Ran.NO


class WeightsError(AgentRLError):
    code = "WEIGHTS"
    ran, retryable = Ran.NO, True


class LaunchError(AgentRLError):
    code = "LAUNCH"
    ran = Ran.NO


def error_classes() -> dict[str, type[AgentRLError]]:
    """Every class of the tree by its code; one that inherited its code is its parent's to others."""
    found: dict[str, type[AgentRLError]] = {}
    queue: list[type[AgentRLError]] = [AgentRLError]
    while queue:
        cls = queue.pop()
        if "code" in vars(cls):
            found[cls.code] = cls
        queue.extend(cls.__subclasses__())
    return found


def from_envelope(body: Mapping[str, Any], fallback: str) -> AgentRLError:
    """Rebuild the error that a service sent; `fallback` is the message when the body is no envelope."""
    error = body.get("error")
    if not isinstance(error, Mapping) or "code" not in error:
        return AgentRLError(fallback)
    cls = error_classes().get(str(error["code"]), AgentRLError)
    return cls(
        str(error.get("message", fallback)),
        blame=Blame(error.get("blame", cls.blame.value)),
        ran=Ran(error.get("ran", cls.ran.value)),
        retryable=bool(error.get("retryable", cls.retryable)),
        detail=error.get("detail") or {},
    )
