"""Prometheus metrics for /metrics. Metrics that vLLM also has use its names, so that its dashboards work.

Counters grow on the event loop. Gauges query the worker when they are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.server.worker import FINISH_REASONS, ReplyRound, WorkerLoad

_LABEL = "model_name"
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_THROUGHPUT_SECONDS = 10.0
"""Seconds over which the throughput is averaged."""
_TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """Counters and histograms of one server, in a registry of its own, each with the model's name as a label."""

    def __init__(self, load: Callable[[str], WorkerLoad]) -> None:
        """`load`: returns the load of the model with the given name."""
        self._registry, self._load = CollectorRegistry(), load
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self.accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at least up to this position.", "position"
        )
        self.prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self.generation = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.disk_hits = self._counter(
            "paceline:prefix_disk_hits", "Prompt tokens found in the prefix cache's folder on disk, a part of its hits."
        )
        self.success = self._counter("vllm:request_success", "Replies by finish reason.", "finished_reason")
        self.queue = self._histogram("vllm:request_queue_time_seconds", "From submission to admission.")
        self.first = self._histogram("vllm:time_to_first_token_seconds", "From submission to the first token.")
        self.later = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens. The tokens of a round share its time.",
            _TOKEN_SECONDS_BUCKETS,
        )
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "From submission to the end.")
        self.draft_failures = self._counter(
            "paceline:draft_failures", "Tokens for which a drafter failed and proposed nothing."
        )
        self.rounds = self._counter("paceline:rounds", "Rounds of replies, including those without a draft.")
        self._running = self._gauge("vllm:num_requests_running", "Replies being generated.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Replies waiting for a slot.")
        self._cache = self._gauge("vllm:kv_cache_usage_perc", "Share of the key-value cache in use, 0 to 1.")
        self._disk = self._gauge("paceline:prefix_disk_bytes", "Size of the prefix cache's folder, of all its models.")
        self._speed = self._gauge("paceline:tokens_per_second", "Tokens per second over the last 10 s.")
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str, adapter: bool = False) -> ModelMetrics:
        """Return the metrics of one model. They continue when the model is loaded again.

        `adapter`: True for an adapter, whose load counts as its model's.
        """
        if model not in self._models:
            mine = self._models[model] = ModelMetrics(self, model)
            self._speed.labels(model).set_function(mine.tokens_per_second)
            if adapter:
                return mine
            self._running.labels(model).set_function(lambda: self._load(model).running)
            self._waiting.labels(model).set_function(lambda: self._load(model).waiting)
            self._cache.labels(model).set_function(lambda: self._load(model).cache)
            self._disk.labels(model).set_function(lambda: self._load(model).disk)
        return self._models[model]

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, (_LABEL, *labels), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = _SECONDS_BUCKETS) -> Histogram:
        return Histogram(name, about, (_LABEL,), buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, (_LABEL,), registry=self._registry)

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Yield the name, labels and value of every series, without the times at which they were created."""
        for family in self._registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield sample.name, sample.labels, sample.value

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class ModelMetrics:
    """Counters and histograms of one model's replies."""

    def __init__(self, server: Metrics, model: str) -> None:
        self._server, self._model = server, model
        self._drafts, self._drafted, self._accepted, self._prompt = (
            family.labels(model) for family in (server.drafts, server.drafted, server.accepted, server.prompt)
        )
        self._generation, self._queries, self._hits, self._rounds = (
            family.labels(model) for family in (server.generation, server.queries, server.hits, server.rounds)
        )
        self._queue, self._first, self._later, self._latency = (
            family.labels(model) for family in (server.queue, server.first, server.later, server.latency)
        )
        self._draft_failures = server.draft_failures.labels(model)
        self._disk_hits = server.disk_hits.labels(model)
        self._recent: deque[tuple[float, int]] = deque()
        """Times and tokens of the rounds of the last `_THROUGHPUT_SECONDS` seconds."""

    def observe_first(self, queued: float, seconds: float, prompt: int, cached: int, from_disk: int = 0) -> None:
        """Count a reply's first token.

        Args:
            queued: Seconds from submission to admission.
            seconds: Seconds from submission to the first token.
            prompt: Tokens of the prompt.
            cached: Tokens of the prompt that came from the prefix cache.
            from_disk: Tokens of the prompt that came from the prefix cache's folder on disk.
        """
        self._queue.observe(queued)
        self._first.observe(seconds)
        self._prompt.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(cached)
        self._disk_hits.inc(from_disk)

    def observe_round(self, round_: ReplyRound, first: bool) -> None:
        """Count a reply's round. `first`: True for the first round, which has no time between tokens."""
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
            self._server.accepted_at.labels(self._model, str(position)).inc()

    def observe_end(self, outcome: str, seconds: float) -> None:
        """Count a reply's end. `outcome`: its finish reason, "error", or "abort" if its client left."""
        self._server.success.labels(self._model, FINISH_REASONS.get(outcome, outcome)).inc()
        self._latency.observe(seconds)

    def observe_draft_failures(self, count: int) -> None:
        """Count the tokens of a reply for which its drafter failed (`Stats.draft_failures`)."""
        self._draft_failures.inc(count)

    def tokens_per_second(self) -> float:
        """Return the speed over the last `_THROUGHPUT_SECONDS` seconds."""
        self._forget()
        return sum(tokens for _, tokens in self._recent) / _THROUGHPUT_SECONDS

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - _THROUGHPUT_SECONDS:
            self._recent.popleft()
