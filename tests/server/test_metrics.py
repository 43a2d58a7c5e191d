"""Counts of /metrics, and contents of traces."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from paceline.drafters.base import Ask
from paceline.drafters.independent import draft_independently
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.server import tracing
from paceline.testing import Oracle
from paceline.types import Draft, DraftBudget
from tests.support.running import Serving, serving
from tests.support.toys import toy_model

CHAT: Any = [{"role": "user", "content": "abc abc abc"}]


def metrics(it: Serving) -> dict[str, float]:
    """Return name (with all labels but the model) -> value."""
    found = {}
    for kind in text_string_to_metric_families(it.get("/metrics").text):
        for sample in kind.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            assert sample.labels["model_name"] == "toy"
            found[sample.name + (str(sorted(labels.items())) if labels else "")] = sample.value
    return found


def test_counts_equal_the_counts_of_the_replies() -> None:
    with serving(LLM(toy_model(), Suffix())) as it:
        before = metrics(it)
        assert before["vllm:num_requests_running"] == before["vllm:num_requests_waiting"] == 0
        assert before["vllm:kv_cache_usage_perc"] == before["paceline:tokens_per_second"] == 0
        body = {"messages": CHAT, "max_tokens": 40}
        used = [
            it.post("/v1/chat/completions", {**body, **more}).json()["usage"]
            for more in ({}, {"speculation": "off"}, {"n": 2, "temperature": 1.0, "seed": 1})
        ]
        after = metrics(it)
    speculation = [one["speculation"] for one in used]
    assert after["vllm:spec_decode_num_draft_tokens_total"] == sum(one["drafted"] for one in speculation) > 0
    assert after["vllm:spec_decode_num_accepted_tokens_total"] == sum(one["accepted"] for one in speculation) > 0
    depth = max(len(one["accepted_at"]) for one in speculation)
    for at in range(depth):
        wanted = sum(one["accepted_at"][at] for one in speculation if at < len(one["accepted_at"]))
        assert after[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[('position', '{at}')]"] == wanted
    assert 0 < after["vllm:spec_decode_num_drafts_total"] < after["paceline:rounds_total"]
    assert after["paceline:rounds_total"] == sum(one["rounds"] for one in speculation)
    written = sum(one["completion_tokens"] for one in used)
    assert after["vllm:generation_tokens_total"] == written
    assert after["vllm:prompt_tokens_total"] == 4 * used[0]["prompt_tokens"]
    assert after["vllm:prefix_cache_queries_total"] == after["vllm:prompt_tokens_total"]
    assert after["vllm:time_to_first_token_seconds_count"] == 4
    assert after["vllm:request_queue_time_seconds_count"] == 4
    assert after["vllm:e2e_request_latency_seconds_count"] == 4
    rounds = after["vllm:inter_token_latency_seconds_count"]
    assert 0 < rounds <= written - 4  # all but each reply's first round
    ended = {name: value for name, value in after.items() if name.startswith("vllm:request_success_total")}
    assert sum(ended.values()) == 4
    assert set(ended) <= {f"vllm:request_success_total[('finished_reason', '{why}')]" for why in ("stop", "length")}


class NotFinite(Oracle):
    """Ranks a row of NaN for every draft."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [draft_independently(one, one.budget, torch.full((1, 37), torch.nan)) for one in asks]


def test_failures_of_a_drafter_are_counted() -> None:
    with serving(LLM(toy_model(), NotFinite([], 0.0, 37), DraftBudget.chain(2))) as it:
        speculation = it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}).json()["usage"][
            "speculation"
        ]
        after = metrics(it)
    assert after["paceline:draft_failures_total"] > 0
    assert speculation["drafted"] == 0


class Exporter:
    """An exporter that stores its spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def export(self, spans: Any) -> None:
        self.spans += spans

    def shutdown(self) -> None:
        pass


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    kept, provider = Exporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("paceline.server.serving.tracer", lambda _: tracing.SpanTracer(provider))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(LLM(toy_model(), Suffix())) as it:
        body = {"messages": CHAT, "max_tokens": 12}
        used = it.post("/v1/chat/completions", body, headers={"traceparent": parent}).json()["usage"]
    spans = {span.name: span for span in kept.spans}
    whole = spans["chat toy"]
    assert format(whole.context.trace_id, "032x") == parent.split("-")[1]
    assert format(whole.parent.span_id, "016x") == parent.split("-")[2]
    assert whole.attributes["gen_ai.usage.input_tokens"] == used["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    assert whole.attributes["gen_ai.request.model"] == "toy"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert whole.attributes["paceline.speculation.accepted"] == used["speculation"]["accepted"]
    marks = [whole.start_time]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == whole.context.span_id
        assert spans[name].start_time == marks[-1]
        marks.append(spans[name].end_time)
    assert marks[-1] == whole.end_time
    assert marks == sorted(marks)


def test_traces_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert type(tracing.tracer(None)) is tracing.Tracer
    with pytest.raises(InvalidOption, match=r"\[telemetry\]"):
        tracing.tracer("http://127.0.0.1:1/v1/traces")


def test_a_collector_that_hangs_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, back = threading.Event(), threading.Event()

    class Hanging:
        def shutdown(self) -> None:
            asked.set()
            assert back.wait(60)

    monkeypatch.setattr(tracing, "_FLUSH", 0.05)
    tracing.SpanTracer(Hanging()).close()
    assert asked.is_set()
    back.set()
