"""Domain errors. Each knows its HTTP status and code; none knows HTTP.

One wrapper in `mlxd.http` turns them into the protocol's envelope. Raise the
most specific one: its message says what was wrong, where, and what was
expected.
"""

from __future__ import annotations


class MlxdError(Exception):
    """Base of every error that a client or an operator may be told about."""

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """
        Args:
            message: a sentence for the client.
            param: path of the offending request field, if there is one.
            code: overrides the class's machine-readable code.
            retry_after: seconds, sent as `Retry-After`.
        """
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after = retry_after


class BadRequest(MlxdError):
    """The client sent something that cannot be served; it never reached an engine."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class Unauthorized(MlxdError):
    """No API key or token came with the request, or an unknown one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(MlxdError):
    """No such route, model or request."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Forbidden(MlxdError):
    """This client may not do this."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class MethodNotAllowed(MlxdError):
    """The route exists, with other methods."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Conflict(MlxdError):
    """The call makes no sense in the present state."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class TooSlow(MlxdError):
    """The body did not come within `server.receive_timeout`."""

    status = 408
    type = "invalid_request_error"
    code = "receive_timeout"


class PreconditionFailed(MlxdError):
    """What the call was based on has changed meanwhile."""

    status = 412
    type = "invalid_request_error"
    code = "precondition_failed"


class Withdrawn(MlxdError):
    """An operator ended the request. Not for trying again, so that no client does."""

    status = 403
    type = "invalid_request_error"
    code = "cancelled_by_operator"


class TooLarge(MlxdError):
    """The body exceeds `server.max_body`."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Unavailable(MlxdError):
    """The daemon or the model cannot take this request now; trying later may help."""

    status = 503
    type = "server_error"
    code = "unavailable"


class QueueFull(Unavailable):
    """As many requests wait as `batch.queue` allows."""

    code = "queue_full"


class Draining(Unavailable):
    """The daemon or the model is draining and admits nothing."""

    code = "draining"


class ModelNotReady(Unavailable):
    """The model is still starting, or has failed."""

    code = "model_not_ready"


class TimedOut(Unavailable):
    """The request met `server.request_timeout` while it still waited."""

    code = "request_timeout"


class EngineFailed(MlxdError):
    """The engine died or a step failed while this request was in it."""

    status = 503
    code = "engine_failed"


class ConfigError(Exception):
    """The configuration cannot be used. Carries every problem, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
