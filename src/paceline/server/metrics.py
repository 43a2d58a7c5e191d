"""What /metrics shows: counts and times under vLLM's names where it has them, so that its dashboards fit.

Everything is counted where replies are handed to clients, on the event loop; what the engine holds right now is asked
of the worker when somebody looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from paceline.server.worker import Load

MEDIA_TYPE = CONTENT_TYPE_LATEST

_LABEL = "model_name"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Metrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self, model: str, load: Callable[[], Load]) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds in which something was drafted.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were kept to this position at least.",
            (_LABEL, "position"),
            registry=self._registry,
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generation = self._counter("vllm:generation_tokens", "Tokens written.")
        self._looked_up = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = Counter(
            "vllm:request_success",
            "Replies by why they ended.",
            (_LABEL, "finished_reason"),
            registry=self._registry,
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From submission to admission.", _SECONDS)
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between tokens; a round's share it.", _STEPS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From submission to the end.", _SECONDS)
        self._rounds = self._counter("paceline:rounds", "Rounds of replies, those without a draft included.")
        self._pace = _Pace()
        self._registry.register(_Now(model, load, self._pace))

    def _counter(self, name: str, about: str) -> Any:
        return Counter(name, about, (_LABEL,), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Any:
        return Histogram(name, about, (_LABEL,), buckets=buckets, registry=self._registry).labels(self._model)

    def first(self, queued: float, seconds: float, prompt: int, cached: int) -> None:
        """A reply's first token came, so many seconds after its submission."""
        self._queue.observe(queued)
        self._first.observe(seconds)
        self._prompt.inc(prompt)
        self._looked_up.inc(prompt)
        self._hits.inc(cached)

    def later(self, seconds: float, tokens: int) -> None:
        """So many tokens more, so long after the last ones."""
        for _ in range(tokens):
            self._gap.observe(seconds / tokens)

    def round(self, speculated: bool, drafted: int, accepted: int, tokens: int) -> None:
        """A reply's round was handed on: so many tokens, of which `accepted` had been drafted."""
        self._rounds.inc()
        self._generation.inc(tokens)
        self._pace.add(tokens)
        self._drafts.inc(speculated)
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for position in range(accepted):
            self._accepted_at.labels(self._model, str(position)).inc()

    def finished(self, reason: str, seconds: float) -> None:
        """A reply is over. `reason`: its finish reason, "error", or "abort" where its client left."""
        self._success.labels(self._model, _REASONS.get(reason, reason)).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Pace:
    """Tokens per second, of all replies over the last `SPAN` seconds."""

    SPAN = 10.0

    def __init__(self) -> None:
        self._written: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        self._written.append((time.monotonic(), tokens))
        self._forget()

    def value(self) -> float:
        self._forget()
        return sum(tokens for _, tokens in self._written) / self.SPAN

    def _forget(self) -> None:
        while self._written and self._written[0][0] < time.monotonic() - self.SPAN:
            self._written.popleft()


class _Now:
    """Gauges, read when they are asked for."""

    def __init__(self, model: str, load: Callable[[], Load], pace: _Pace) -> None:
        self._model, self._load, self._pace = model, load, pace

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._load()
        for name, about, value in (
            ("vllm:num_requests_running", "Replies being written.", load.running),
            ("vllm:num_requests_waiting", "Replies waiting for a slot.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Part of the cache in use, 1 is all.", load.cache),
            ("paceline:tokens_per_second", "Tokens written per second, over the last ten.", self._pace.value()),
        ):
            gauge = GaugeMetricFamily(name, about, labels=(_LABEL,))
            gauge.add_metric((self._model,), value)
            yield gauge
