"""The page at ``/``: files as they are, in a browser that may load nothing from elsewhere."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing but these files and this server; no text is ever parsed as HTML.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {
    "chat.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "index.html": "text/html",
    "main.js": "text/javascript",
    "server.js": "text/javascript",
    "stats.js": "text/javascript",
    "style.css": "text/css",
}


def routes() -> list[Route]:
    """The page and its files, which hold nothing of the server's and need no key."""
    return [_route("/" if name == "index.html" else f"/page/{name}", name) for name in TYPES]


def paths() -> frozenset[str]:
    """Where they are."""
    return frozenset(route.path for route in routes())


def _route(path: str, name: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=TYPES[name])

    return Route(path, serve)
