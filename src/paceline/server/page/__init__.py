"""The page at `/`: a handful of static files, and the headers that keep it to this server."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    # No other host, no inline script or style: a reply that got into the page as markup could still do nothing.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for anew each time, so that the page is always of the version that the server is.
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/` and `/page/{name}`: add them to the application's routes. They ask for no API key: the page asks for it."""
    # Read once, and served by name from here: no path that a client sends ever reaches the file system.
    files = {path.name: path for path in Path(__file__).parent.iterdir() if path.suffix in _TYPES}
    contents = {name: (path.read_bytes(), _TYPES[path.suffix]) for name, path in files.items()}

    def send(name: str) -> Response:
        if name not in contents:
            return PlainTextResponse("Not found", 404)
        body, kind = contents[name]
        return Response(body, media_type=kind, headers=HEADERS)

    async def index(_: Request) -> Response:
        return send("index.html")

    async def file(request: Request) -> Response:
        return send(request.path_params["name"])

    return [Route("/", index), Route("/page/{name}", file)]
