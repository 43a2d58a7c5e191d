"""Fields of other servers: docs/reference/fields.md lists them as the code treats them.

`PACELINE_WRITE=1 pytest tests/server/test_fields.py` writes the tables again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.server import compat
from paceline.server.apis.chat_completions import ChatRequest
from paceline.server.apis.completions import CompletionRequest
from paceline.server.apis.messages import MessagesRequest
from paceline.server.apis.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from paceline.server.apis.responses_request import ResponsesRequest
from paceline.server.compat import Rule
from tests.support.other_servers import CHAT, COMPLETION, OLLAMA
from tests.support.running import Serving

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fields.md"
BEGIN, END = "<!-- fields: made by tests/server/test_fields.py -->\n\n", "\n<!-- end of fields -->"
OLLAMAS = {"/api/chat": OllamaChatRequest, "/api/generate": OllamaGenerateRequest, "options": OllamaOptions}
MODELS: list[type[BaseModel]] = [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, *OLLAMAS.values()]
CHAT_BODY = {"messages": [{"role": "user", "content": "a"}]}


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def rule_of(field: FieldInfo) -> Rule | None:
    return next((one for one in field.metadata if isinstance(one, Rule)), None)


def treatment(model: type[BaseModel], name: str) -> tuple[str, str]:
    """Return a model's treatment of a field (accepted, ignored, refused, or some values accepted), and why."""
    field = fields(model).get(name)
    if field is None:
        return "unknown", ""
    rule = rule_of(field)
    if rule is None:
        return "taken", field.description or ""
    if rule.values is None:
        return "ignored", rule.why
    values = " or ".join(f"`{json.dumps(value)}`" for value in rule.values)
    return (f"refused unless {values}" if values else "refused"), rule.why


def owners(listed: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for server, names in listed.items():
        for name in names.split():
            if server not in found.setdefault(name, []):
                found[name].append(server)
    return dict(sorted(found.items(), key=lambda item: item[0].strip("_")))


def rows(listed: dict[str, str], models: dict[str, type[BaseModel]]) -> Iterator[str]:
    for name, servers in owners(listed).items():
        found = {title: treatment(model, name) for title, model in models.items() if name in fields(model)}
        said = sorted({effect for effect, _ in found.values()})
        effect = said[0] if len(said) == 1 else "; ".join(f"{title}: {found[title][0]}" for title in found)
        missing = [title for title in models if title not in found]
        effect += f" ({next(iter(found))} only)" if found and missing else ""
        why = next((why for _, why in found.values() if why), "").rstrip(".")
        yield f"| `{name}` | {', '.join(servers)} | {effect or 'unknown'} | {why} |"


def tables() -> str:
    head = "|---|---|---|---|"
    both = {"chat": ChatRequest, "completion": CompletionRequest}
    merged = {server: " ".join((CHAT.get(server, ""), COMPLETION.get(server, ""))) for server in {**CHAT, **COMPLETION}}
    parts = ["## OpenAI's API\n", "| field | of | here | |", head, *rows(merged, both)]
    parts += ["\n## Ollama's own API\n", "| field | in | here | |", head]
    for where, model in OLLAMAS.items():
        parts += rows({where: OLLAMA[where]}, {where: model})
    return "\n".join(parts) + "\n"


def test_the_page_says_what_the_code_does() -> None:
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    written, after = rest.split(END)
    if os.environ.get("PACELINE_WRITE"):
        PAGE.write_text(before + BEGIN + tables() + END + after, "utf-8")
        return
    assert written == tables()


def test_every_field_of_other_servers_is_known() -> None:
    for name in owners({**CHAT}):
        assert treatment(ChatRequest, name)[0] != "unknown", name
    for name in owners({**COMPLETION}):
        assert treatment(CompletionRequest, name)[0] != "unknown", name
    for where, model in OLLAMAS.items():
        for name in OLLAMA[where].split():
            assert treatment(model, name)[0] != "unknown", (where, name)


def test_every_rule_has_a_reason() -> None:
    for model in MODELS:
        for name, field in fields(model).items():
            rule = rule_of(field)
            assert rule is None or rule.why, name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_rules_are_kept(model: type[BaseModel]) -> None:
    least: dict[str, Any] = {"model": "m", "max_tokens": 1, **CHAT_BODY}
    least = {"prompt": "a"} if model is CompletionRequest else least
    least = {name: value for name, value in least.items() if name in fields(model)}
    odd = {"": [0.5]}
    for name, field in fields(model).items():
        rule = rule_of(field)
        if rule is None:
            continue
        assert model.model_validate({**least, name: None})
        for value in rule.values if rule.values is not None else (odd,):
            made = model.model_validate({**least, name: value})
            assert odd not in made.model_dump(exclude_none=True).values()
        if rule.values is not None:
            with pytest.raises(ValidationError, match="not supported by this server"):
                model.model_validate({**least, name: odd})


def test_an_ignored_field_is_named_once(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    compat._logged.clear()
    caplog.set_level(logging.INFO, "paceline")
    for _ in range(3):
        body = {**CHAT_BODY, "max_tokens": 1, "samplers": ["secret"], "draft_model": None}
        assert served.post("/v1/chat/completions", body).status_code == 200
        options = {"num_predict": 1, "num_gqa": 8}
        answer = served.post("/api/chat", {**CHAT_BODY, "model": "toy", "stream": False, "x\ny": 1, "options": options})
        assert answer.status_code == 200
    said = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert [line.partition(": ")[2].partition(" (")[0] for line in said] == ["samplers", "x\\ny", "num_gqa"]
    assert "secret" not in caplog.text


def test_the_number_of_kept_names_is_limited() -> None:
    compat._logged.clear()
    for i in range(200):
        OllamaOptions.model_validate({f"x{i}.{k}": 1 for k in range(100)})
    assert len(compat._logged) <= 1000
    compat._logged.clear()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_fields_of_other_servers_reach_every_api(served: Serving, path: str) -> None:
    body = {**CHAT_BODY, "max_tokens": 2} if path == "/v1/messages" else {"input": "a", "max_output_tokens": 2}
    assert served.post(path, {**body, "cache_prompt": True, "id_slot": 1, "mirostat": 0}).status_code == 200
    assert served.post(path, {**body, "mirostat": 1}).status_code == 400
    assert served.post(path, {**body, "temprature": 1}).status_code == 400
