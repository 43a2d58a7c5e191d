"""Requests that schemathesis generates from the OpenAPI document: every answer conforms to the document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import hypothesis
import pytest

from tests.support.described import EXAMPLES
from tests.support.running import Serving

pytestmark = pytest.mark.slow


@cache
def schemathesis() -> Any:
    """The module, which only these tests import."""
    return pytest.importorskip("schemathesis", reason="the extra dev has it")


GENERATING = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages"),
    *("POST /v1/responses/compact",),
    *("POST /v1/messages/count_tokens", "POST /api/chat", "POST /api/generate", "POST /apply-template", "POST /infill"),
)
"""Operations with large bodies. Schemathesis takes seconds to make the first body of each."""


def document(served: Serving) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/openapi.json").json()
    return found


def operations(served: Serving) -> Mapping[str, Any]:
    found = schemathesis().openapi.from_dict(document(served)).get_all_operations()
    return {one.ok().label: one.ok() for one in found}


def check(served: Serving, operation: Any, count: int) -> set[int]:
    """Send `count` requests and check their answers. Return the statuses."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    said = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    said += [checks.response_schema_conformance, checks.response_headers_conformance]
    statuses: set[int] = set()

    @hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):  # most names are of no model
            case.body.update(dict.fromkeys({"model", "name"} & {*case.body}, "toy"))
            case.body.pop("timeout", None)  # a short one is answered with 504, as it should be
        if case.path_parameters.get("name"):
            case.path_parameters["name"] = "toy"
        answer = case.call(base_url=served.address, timeout=60)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=said)

    ask()
    return statuses


def test_small_requests_are_answered_as_documented(served: Serving) -> None:
    found = operations(served)
    small = {label: check(served, found[label], 5) for label in found if label not in GENERATING}
    assert len(small) >= 12
    refused = {"GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}", "POST /api/pull"}
    # Few texts contain only the toy's letters.
    refused |= {"GET /v1/responses/{response_id}/input_items", "POST /v1/embeddings", "POST /tokenize"}
    refused |= {"POST /v1/rerank", "POST /rerank", "POST /slots/{slot}"}  # toy judges no documents and keeps none
    assert {label for label, statuses in small.items() if 200 not in statuses} <= refused


@pytest.mark.parametrize("label", GENERATING)
def test_requests_for_text_are_answered_as_documented(served: Serving, label: str) -> None:
    check(served, operations(served)[label], EXAMPLES)


def test_an_answer_that_differs_from_the_document_is_found(served: Serving) -> None:
    changed = document(served)
    changed["components"]["schemas"]["Health"]["required"].append("uptime")
    [health] = [
        one.ok()
        for one in schemathesis().openapi.from_dict(changed).get_all_operations()
        if one.ok().label == "GET /health"
    ]
    from schemathesis.core.failures import FailureGroup

    with pytest.raises(FailureGroup) as caught:
        check(served, health, 1)
    assert any("uptime" in str(failure) for failure in caught.value.exceptions)
