"""Who may ask: an API key, and the names that the server may be called by."""

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstow.serve import page
from kvstow.serve.options import Limits
from kvstow.serve.refusal import Refusal

OPEN = page.paths() | {"/health"}


class Guard:
    """Answers those who may not ask; lets the others through.

    A web page can make a browser call any address under a name of its own (DNS rebinding). So
    a server without a key answers to its own names only.

    Args:
        app: What is guarded.
        limits: Key and names.
        refused: Called with the reason when one is not let through.
    """

    def __init__(self, app: ASGIApp, limits: Limits, refused: Callable[[str], None]) -> None:
        self._app = app
        self._refused = refused
        self._key = None if limits.api_key is None else limits.api_key.encode()
        self._hosts = frozenset(limits.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or not."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._refused(refusal.code)
        response = JSONResponse(refusal.as_dict(), refusal.status, refusal.headers)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        host = _name(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            message = f"this server is not called {host!r}: see --allowed-host"
            return Refusal(403, message, code="host_not_allowed")
        if self._key is None or scope["path"] in OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), self._key):
            return None
        got = "another one" if key else "none"
        message = f"an API key is needed in the header Authorization: Bearer, got {got}"
        return Refusal(401, message, code="invalid_api_key")


def _name(host: str) -> str:
    """A host without its port.

    >>> _name("localhost:8080"), _name("[::1]:8080"), _name("Example.org")
    ('localhost', '::1', 'example.org')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
