"""A fake hub on 127.0.0.1 with a few files: listings, metadata, downloads with ranges, and failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


class Hub:
    """State of the fake hub.

    Attributes:
        repositories: Name -> file -> content.
        requests: (method, path, Range header) of each request.
        authorizations: Authorization headers of all requests.
        cut: Number of bytes after which the next download breaks off, or None.
        damaged: True to send content that does not match its hash.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        self.authorizations: set[str | None] = set()
        self.cut: int | None = None
        self.damaged = False
        self.address = ""

    def listing(self, name: str) -> dict[str, Any]:
        siblings = []
        for file, content in self.repositories[name].items():
            about: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": "b" * 40}
            if file.endswith((".gguf", ".safetensors")):
                about["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            siblings.append(about)
        return {"id": name, "sha": COMMIT, "private": False, "gated": False, "tags": [], "siblings": siblings}

    def tree(self, name: str) -> list[dict[str, Any]]:
        found = []
        for one in self.listing(name)["siblings"]:
            about = {"type": "file", "path": one["rfilename"], "oid": one["blobId"], "size": one["size"]}
            if lfs := one.get("lfs"):
                about["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
            found.append(about)
        return found

    def downloads(self) -> list[str | None]:
        """Range header of each download of a GGUF file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(".gguf")]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            hub.authorizations.add(self.headers.get("Authorization"))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                if name not in hub.repositories:
                    return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                if parts[4:5] == ["revision"] and parts[5] not in ("main", COMMIT):
                    return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                if parts[4:5] == ["tree"]:
                    return self.reply(200, json.dumps(hub.tree(name)).encode())
                return self.reply(200, json.dumps(hub.listing(name)).encode())
            content = hub.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if content is None:
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self.send(content)

        def send(self, content: bytes) -> None:
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            status, sent = 200, content
            if hub.damaged:
                sent = sent[:-1] + bytes([sent[-1] ^ 1])
            if span := self.headers.get("Range"):
                first = int(span.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                status, sent = 206, sent[first:]
            if self.command == "GET" and hub.cut is not None and hub.cut < len(sent):
                self.reply(status, sent, headers, hub.cut)
                hub.cut = None
                self.close_connection = True
                return None
            return self.reply(status, sent, headers)

        def reply(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, most: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:most])

    return Handler


@contextmanager
def hub_server(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories until the block ends."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
