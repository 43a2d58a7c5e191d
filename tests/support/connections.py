"""Plain sockets to a listening server."""

from __future__ import annotations

import socket

from tests.support.running import Serving


def connect(it: Serving, receive: int | None = None) -> socket.socket:
    host, port = it.address.removeprefix("http://").split(":")
    client = socket.socket()
    if receive:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.connect((host, int(port)))
    return client


def request(body: bytes) -> bytes:
    head = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body
