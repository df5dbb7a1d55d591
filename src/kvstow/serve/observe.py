"""Where the statistics are to be had: as JSON, for Prometheus, and as a page."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstow.serve import page
from kvstow.serve.metrics import Metrics
from kvstow.serve.stats import Stats

FRESH = {"Cache-Control": "no-store"}


def routes(read: Callable[[], Stats]) -> list[Route]:
    """Everything that shows what `read` says; it is called in the event loop's thread."""
    metrics = Metrics(read)

    async def stats(_: Request) -> Response:
        return JSONResponse(read().as_dict(), headers=FRESH)

    async def scrape(request: Request) -> Response:
        body, content_type = metrics.scrape(request.headers.get("accept", ""))
        return Response(body, headers=FRESH | {"Content-Type": content_type})

    return [Route("/v1/kvstow/stats", stats), Route("/metrics", scrape), *page.routes()]
