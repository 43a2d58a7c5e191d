"""Small routes, the page, and the description of the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_policy import shown_name
from paceline.errors import InvalidOption, PacelineError
from paceline.llm import LLM
from paceline.server import errors
from paceline.server.app import PAGE, POLICY, add_page
from paceline.server.description import Health
from paceline.server.models import ModelSource
from paceline.server.worker import Busy, ServerStopping, Worker
from tests.support.pages import ROOT
from tests.support.running import Serving, serving
from tests.support.toys import toy_llm, toy_model

BODIES = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"}


def test_health(served: Serving) -> None:
    assert served.idle()
    assert served.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_models(served: Serving) -> None:
    models = served.openai.models.list().data
    assert [model.id for model in models] == ["toy", "other/name"]
    about = models[0].model_dump()["paceline"]
    assert about["drafters"] == ["suffix", "ngram"]
    assert about["default"] == "suffix"
    assert about["context_length"] == 256
    assert about["guarantee"] in ("bits", "rounding")
    assert served.openai.models.retrieve("other/name").id == "other/name"
    assert served.get("/v1/models/none").status_code == 404
    assert served.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_drafters_are_shown_without_folders(tmp_path: Path) -> None:
    paths = [tmp_path / "one" / "draft", tmp_path / "two" / "draft"]
    named = {"suffix": Suffix(), f"model:{paths[0]}": NGram(), f"model:{paths[1]}": NGram()}
    with serving(LLM(toy_model(), named)) as it:
        answer = it.get("/v1/models")
        assert str(tmp_path) not in answer.text
        assert answer.json()["data"][0]["paceline"]["drafters"] == ["suffix", "model:draft", "model:draft-2"]
        for asked, shown in ((f"model:{paths[1]}", "model:draft-2"), ("model:draft", "model:draft")):
            made = it.post("/v1/completions", {"prompt": "hello", "speculation": {"drafter": asked}}).json()
            assert made["usage"]["speculation"]["drafter"] == shown
        wrong = it.post("/v1/completions", {"prompt": "hello", "speculation": {"drafter": "x"}})
        assert "model:draft-2" in wrong.json()["error"]["message"]
        assert str(tmp_path) not in wrong.text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("suffix", "suffix"),
        ("early-exit:4+suffix", "early-exit:4+suffix"),
        ("suffix+eagle3:/home/me/head", "suffix+eagle3:head"),
        ("model:/srv/base@/home/me/adapter", "model:base@adapter"),
        ("model:./draft.gguf", "model:draft.gguf"),
        ("eagle3:owner/name", "eagle3:owner/name"),
    ],
)
def test_names_of_drafters(given: str, shown: str) -> None:
    assert shown_name(given) == shown


def test_tokens_there_and_back(served: Serving) -> None:
    made = served.post("/tokenize", {"prompt": "hello", "model": "toy"}).json()
    assert made == {"tokens": [7, 4, 11, 11, 14], "count": 5, "max_model_len": 256}
    assert served.post("/detokenize", {"tokens": made["tokens"]}).json()["prompt"] == "hello"
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert served.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<user:hi><a:"
    bare = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    assert served.post("/tokenize", bare).json()["count"] == chat["count"] - 3
    assert served.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    begun = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so a"}]}
    continued = served.post("/tokenize", {**begun, "continue_final_message": True}).json()["tokens"]
    text = served.post("/detokenize", {"tokens": continued}).json()["prompt"]
    assert text == "<user:hi><assistant:so a"
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "model": "x"}),
        ("/detokenize", {"tokens": [37]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {}),
    ):
        answer = served.post(path, body)
        assert answer.status_code == (404 if "model" in body else 400)
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/nope", "/v1", "/v1/", "/v1/chat/completions/", "/docs", "/../etc/passwd", "/%2e%2e/x"]
)
def test_paths_that_are_none(served: Serving, path: str) -> None:
    answer = served.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_methods_that_are_none(served: Serving) -> None:
    answer = served.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_the_api_describes_itself(served: Serving) -> None:
    told = served.get("/openapi.json").json()
    schemas = told["components"]["schemas"]
    for path, name in BODIES.items():
        post = told["paths"][path]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(post["responses"])
        assert post["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
        assert schemas[name]["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert not any("422" in operation["responses"] for path in told["paths"].values() for operation in path.values())
    assert set(references(told)) <= {f"#/components/schemas/{name}" for name in schemas}


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in references(value)]
    return [ref for value in node for ref in references(value)] if isinstance(node, list) else []


def test_the_page_is_served_strictly(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "app.js").write_text("1")
    app = FastAPI()
    add_page(app, tmp_path)
    client = TestClient(app)
    page = client.get("/")
    assert page.text == "<!doctype html>"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    script = client.get("/js/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["x-content-type-options"] == "nosniff"
    assert client.get("/js/app.js", headers={"If-None-Match": script.headers["etag"]}).status_code == 304
    assert client.get("/js").status_code == 404
    assert client.get("/js/../../etc/passwd").status_code == 404


def test_the_page_brings_all_that_it_loads() -> None:
    from starlette.testclient import TestClient

    app = FastAPI()
    add_page(app, PAGE)
    client = TestClient(app)
    loaded = {}
    for file in PAGE.rglob("*.*"):
        folder = file.parent.relative_to(PAGE)
        named = r"""(?:from|import\() ?["']([^"']+)|(?:href|src)="([^"#]+)"|url\('?([\w.-]+)'?\)"""
        text = "" if file.suffix == ".woff2" else file.read_text()
        names = [name for found in re.findall(named, text) for name in found if name]
        loaded |= {f"/{(folder / name).as_posix()}": file.name for name in names if file.name != "temml.min.js"}
    assert {"/app.js", "/temml/temml.min.js", "/temml/Temml.woff2"} <= loaded.keys()
    for path, file in loaded.items():
        answer = client.get(path)
        assert answer.status_code == 200, f"{file} loads {path}"
        assert answer.headers["content-type"] != "application/octet-stream", path
        assert answer.headers["content-security-policy"] == POLICY


def test_the_licence_of_a_library_goes_with_it() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for folder in (path for path in PAGE.iterdir() if path.is_dir()):
        assert (folder / "LICENSE").is_file()
        assert f'"{(folder / "LICENSE").relative_to(ROOT)}"' in project


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Busy("full", "Wait"), 429, "rate_limit_error"),
        (ServerStopping(), 503, "server_error"),
        (PacelineError("odd"), 500, "server_error"),
        (ZeroDivisionError("private"), 500, "server_error"),
    ],
)
def test_errors_have_a_status(error: Exception, status: int, kind: str) -> None:
    told = errors.api_error(error)
    assert (told.status, told.type) == (status, kind)
    assert ("retry-after" in {name.lower() for name in told.headers}) == (status in (429, 503))
    assert "private" not in told.message


def test_a_model_that_is_not_served_is_told_what_is(served: Serving) -> None:
    answer = served.post("/v1/completions", {"model": "gpt-4", "prompt": "a"})
    assert answer.status_code == 404
    assert "'toy', 'other/name'" in answer.json()["error"]["message"]


def test_a_model_has_no_empty_names() -> None:
    with pytest.raises(InvalidOption, match="name must not be empty"):
        ModelSource(("toy", ""), lambda: Worker(toy_llm()))


ASKED: list[tuple[str, Any]] = [
    ("/health", None),
    ("/v1/models", None),
    ("/v1/models/toy", None),
    ("/api/version", None),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/show", {"model": "toy"}),
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", {"prompt": "hello", "with_pieces": True}),
    ("/detokenize", {"tokens": [7, 4]}),
    ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/embeddings", {"input": ["hello"]}),
    ("/api/embed", {"model": "toy", "input": "hello"}),
    ("/api/embeddings", {"model": "toy", "prompt": "hello"}),
    ("/v1/models/none", None),
    ("/v1/completions", {"prompt": "hello", "nonsense": 1}),
    ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ("/api/show", {"model": "none"}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_answers_are_as_the_description_says(served: Serving, path: str, body: Any) -> None:
    answer = served.get(path) if body is None else served.post(path, body)
    described = served.get("/openapi.json").json()["paths"]
    route = path if path in described else "/v1/models/{name}"
    said = described[route]["get" if body is None else "post"]["responses"][str(answer.status_code)]
    model = said["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    (kind,) = (kind for kind in served.thread.app.state.models if kind.__name__ == model)
    kind.model_validate(answer.json())


def test_an_answer_that_differs_from_the_description_is_found() -> None:
    with pytest.raises(ValidationError, match="uptime"):
        Health.model_validate({"status": "ok", "running": 0, "waiting": 0, "uptime": 1})
