"""The web page at /: static files that may load nothing from other origins."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html"}


def add_page(app: FastAPI, folder: Path) -> None:
    """Add a route for each file of a folder, `index.html` at /. The files are read once; no other can be requested."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            path = "/" if name == "index.html" else f"/{name}"
            app.add_api_route(path, _endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)


def _endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    data = file.read_bytes()
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return send
