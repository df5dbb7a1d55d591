"""An answer that is no: a status, and OpenAI's error object."""

from typing import Any

from kvstow.errors import KvstowError

# OpenAI's word for what went wrong, by status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_SERVER_STATUS = 500  # and above: not the client's fault


class Refusal(KvstowError):
    """A request that is not answered.

    Args:
        status: Of HTTP.
        message: What was wrong, what is allowed, what was got.
        code: A word for programs.
        param: The parameter that is to blame, if one is.
        retry_after_s: When it may be tried again, if it may.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's kind of error."""
        if self.status >= _SERVER_STATUS:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def as_dict(self) -> dict[str, Any]:
        """The body of the response."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class BadRequest(Refusal):
    """What no later moment makes right."""

    def __init__(self, param: str | None, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(400, message, code=code, param=param)


class GenerationFailed(Refusal):
    """The engine failed; what it said."""

    def __init__(self, error: Exception | str) -> None:
        super().__init__(500, f"generation failed: {error}", code="generation_failed")


class Unexpected(Refusal):
    """A mistake of the program's; what it was is logged, and not said."""

    def __init__(self) -> None:
        message = "an error of the server itself; its log has more"
        super().__init__(500, message, code="internal_error")

    @property
    def headers(self) -> dict[str, str]:
        """With what tells clients that uvicorn closes the connection behind an error."""
        return {**super().headers, "Connection": "close"}


class Stopping(Refusal):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping", code="stopping")


class TooSlow(Refusal):
    """The request has taken as long as any may."""

    def __init__(self) -> None:
        message = "the request took longer than --request-timeout"
        super().__init__(504, message, code="request_timeout")
