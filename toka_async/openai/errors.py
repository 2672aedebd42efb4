"""The one error type of the API and its JSON shape: {"error": {"message", "type", "param", "code"}}.

Knows HTTP status numbers; knows no web framework.
"""

from __future__ import annotations

import msgspec

TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error", 507: "server_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An error that the client sees.

    Args:
        status: the HTTP status.
        message: for people; names the field and the fix.
        param: the field of the request at fault.
        code: for programs, e.g. `model_not_found`.
        retry_after: seconds after which a retry makes sense.
        logged: replaces the message in logs where the message may quote a prompt.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.logged = message if logged is None else logged

    def response(self) -> ErrorResponse:
        kind = TYPES.get(self.status, "invalid_request_error")
        return ErrorResponse(ErrorBody(self.message, kind, self.param, self.code))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(model: str, served: str) -> ApiError:
    """Returns a 404; `served` is the model that is served."""
    message = f"the model {model[:256]!r} does not exist; this server serves {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")
