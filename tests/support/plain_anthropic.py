"""A substitute for Anthropic's client, which takes two seconds to import. It sends JSON and returns attributes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx

from tests.support.running import Serving


class PlainAnthropic:
    """A client of a server. Responses other than 200 raise `httpx.HTTPStatusError`."""

    def __init__(self, it: Serving) -> None:
        self._it = it
        self.messages = SimpleNamespace(create=self._create, count_tokens=self._count_tokens)

    def _create(self, extra_body: Any = None, **asked: Any) -> Any:
        return self._send("/v1/messages", {**asked, **(extra_body or {})})

    def _count_tokens(self, **asked: Any) -> Any:
        return self._send("/v1/messages/count_tokens", asked)

    def _send(self, path: str, body: Any) -> Any:
        headers = {"x-api-key": self._it.key, "anthropic-version": "2023-06-01"}
        answer: httpx.Response = self._it.post(path, body, headers=headers)
        return json.loads(answer.raise_for_status().text, object_hook=lambda fields: SimpleNamespace(**fields))
