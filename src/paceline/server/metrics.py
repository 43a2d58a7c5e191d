"""Prometheus metrics for /metrics, under vLLM's names where it has them, so that its dashboards fit.

Counters grow on the event loop, where replies are handed to clients; gauges ask the worker when they are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.server.choices import FINISH_REASONS
from paceline.server.worker import Load, ReplyRound

_LABEL = "model_name"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SPAN = 10.0
"""Seconds of the throughput."""
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self, model: str, load: Callable[[], Load]) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted at least up to this position.",
            (_LABEL, "position"),
            registry=self._registry,
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generation = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = Counter(
            "vllm:request_success", "Replies by finish reason.", (_LABEL, "finished_reason"), registry=self._registry
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From submission to admission.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From submission to the first token.")
        self._later = self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens; those of one round share its time.", _TOKEN_SECONDS
        )
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "From submission to the end.")
        self._rounds = self._counter("paceline:rounds", "Rounds of replies, including those without a draft.")
        self._recent: deque[tuple[float, int]] = deque()
        """Times and tokens of the rounds of the last `_SPAN` seconds."""
        self._gauge("vllm:num_requests_running", "Replies being generated.", lambda: load().running)
        self._gauge("vllm:num_requests_waiting", "Replies waiting for a slot.", lambda: load().waiting)
        self._gauge("vllm:kv_cache_usage_perc", "Share of the key-value cache in use, 0 to 1.", lambda: load().cache)
        self._gauge("paceline:tokens_per_second", "Tokens per second over the last 10 s.", self._tokens_per_second)

    def _counter(self, name: str, about: str) -> Any:
        return Counter(name, about, (_LABEL,), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        return Histogram(name, about, (_LABEL,), buckets=buckets, registry=self._registry).labels(self._model)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        Gauge(name, about, (_LABEL,), registry=self._registry).labels(self._model).set_function(value)

    def observe_first(self, queued: float, seconds: float, prompt: int, cached: int) -> None:
        """Count a reply's first token. `queued`, `seconds`: until admission and until now, from submission.

        `prompt`: tokens of its prompt, of which `cached` came from the prefix cache.
        """
        self._queue.observe(queued)
        self._first.observe(seconds)
        self._prompt.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(cached)

    def observe_round(self, round_: ReplyRound, first: bool) -> None:
        """Count a reply's round. `first`: it is the first, whose tokens have no time between them."""
        tokens, accepted = len(round_.chunks), round_.accepted
        for _ in () if first else round_.chunks:
            self._later.observe(round_.ms / 1000 / tokens)
        self._rounds.inc()
        self._generation.inc(tokens)
        self._recent.append((time.monotonic(), tokens))
        self._forget()
        self._drafts.inc(round_.chunks[0].origin != "plain")
        self._drafted.inc(round_.drafted)
        self._accepted.inc(accepted)
        for position in range(accepted):
            self._accepted_at.labels(self._model, str(position)).inc()

    def observe_end(self, outcome: str, seconds: float) -> None:
        """Count a reply's end. `outcome`: its finish reason, "error", or "abort" if its client left."""
        self._success.labels(self._model, FINISH_REASONS.get(outcome, outcome)).inc()
        self._latency.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _tokens_per_second(self) -> float:
        self._forget()
        return sum(tokens for _, tokens in self._recent) / _SPAN

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _SPAN:
            self._recent.popleft()
