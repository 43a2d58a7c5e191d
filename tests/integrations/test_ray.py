"""Replicas on a Ray cluster on this machine, deployed from deploy/ray-serve.yaml."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

ray = pytest.importorskip("ray", reason="needs the extra ray")

from ray.exceptions import RayActorError  # noqa: E402
from ray.serve._private.build_app import build_app  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402
from starlette.requests import Request  # noqa: E402

import paceline  # noqa: E402
from paceline.cli.commands import parsed  # noqa: E402
from paceline.cli.serve import application  # noqa: E402
from paceline.errors import InvalidOption  # noqa: E402
from paceline.integrations.ray import Front, PrefixRouter, Replica, app, front_settings  # noqa: E402
from paceline.integrations.replica_streams import known  # noqa: E402
from paceline.integrations.routing import SESSION, Route, rank_replicas, route_of  # noqa: E402
from paceline.server.limits import Settings  # noqa: E402
from tests.support.replicas import DEPLOY, Replicas, cluster  # noqa: E402
from tests.support.running import Serving, serving  # noqa: E402
from tests.support.tiny_model import write_tiny  # noqa: E402

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
_ERROR = "replica_died"
PREFIXES = 12.5 * 460 * 264 / 2**30
"""GiB for a dozen prompts of 460 tokens. A token takes 8 bytes for its id and 256 for its keys and values."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[Serving]:
    """Return one server with the same model, without Ray."""
    with serving(paceline.load(str(model), drafter="suffix"), model=model.name) as it:
        yield it


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[tuple[Replicas, int]]:
    with cluster() as (replicas, metrics):
        replicas.deploy(2, 2, model=str(model), prefix_memory=PREFIXES)
        yield replicas, metrics


@pytest.fixture
def two(running: tuple[Replicas, int]) -> Replicas:
    """Return two running replicas, after any changes by earlier tests."""
    replicas, _ = running
    if replicas.running() != 2:
        replicas.deploy(2, 2)
    return replicas


def body(text: str, tokens: int = 40, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"messages": said, "max_tokens": tokens, "ignore_eos": True, "seed": 7, "temperature": 1.0, **more}


def sessions_of(names: list[str], each: int) -> list[dict[str, str]]:
    """Return headers of sessions, with the same number for each replica, alternating between replicas."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    for i in range(1000):
        headers = {SESSION: str(i)}
        found[names[rank_replicas(route_of(headers, b""), names, lambda _: 0)[0][0]]].append(headers)
    return [headers for group in zip(*found.values(), strict=False) for headers in group][: each * len(names)]


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(
    it: Serving, asked: dict[str, Any], headers: dict[str, str] | None = None, begun: threading.Semaphore | None = None
) -> tuple[str, str | None]:
    """Return the text of a stream, and the code of the error that ended it."""
    parts: list[str] = []
    asked = asked | {"stream": True}
    with httpx.stream("POST", it.address + CHAT, json=asked, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return "".join(parts), event["error"]["code"]
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
                if begun and len(parts) == 3:
                    begun.release()
    return "".join(parts), None


def test_replies_equal_the_replies_of_one_server(two: Replicas, one: Serving) -> None:
    for asked in (body("hello"), body("good morning"), body("hello", temperature=0), body("hello", n=2)):
        ours, theirs = two.post(CHAT, asked).json(), one.post(CHAT, asked).json()
        assert ours["choices"] == theirs["choices"]
        assert streamed(two, asked) == streamed(one, asked)
    assert two.openai.models.list().data[0].id == one.openai.models.list().data[0].id
    for path in ("/", "/health", "/v1/models/none", "/nowhere"):
        ours, theirs = two.get(path), one.get(path)
        assert (ours.status_code, ours.headers["content-type"]) == (theirs.status_code, theirs.headers["content-type"])
        assert path in ("/health", "/v1/models/none") or ours.content == theirs.content


def test_errors_equal_the_errors_of_one_server(two: Replicas, one: Serving) -> None:
    faults = (
        "no object",
        {"messages": "x"},
        body("hello", temperature=-1),
        body("a", model="none"),
        {"a": "b" * (5 << 20)},
    )
    for path in (CHAT, "/v1/messages", "/api/chat"):
        for fault in faults:
            ours, theirs = two.post(path, fault), one.post(path, fault)
            assert ours.status_code == theirs.status_code >= 400
            assert re.sub("req[^,]*", "", ours.text) == re.sub("req[^,]*", "", theirs.text)
    assert two.get("/metrics").status_code == 404


def test_a_stored_response_is_found_by_its_session(two: Replicas) -> None:
    mine = {"X-Session-Id": "someone"}
    asked = {"input": "hello", "max_output_tokens": 5}
    answer = two.post("/v1/responses", asked, headers=mine).json()
    more = {**asked, "previous_response_id": answer["id"]}
    for _ in range(5):
        assert two.post("/v1/responses", more, headers=mine).status_code == 200
        assert two.get(f"/v1/responses/{answer['id']}", headers=mine).status_code == 200
    found = {two.get(f"/v1/responses/{answer['id']}", headers={"X-Session-Id": str(i)}).status_code for i in range(20)}
    assert found == {200, 404}, "other sessions are on both replicas"


def test_a_client_that_leaves_ends_its_reply(two: Replicas) -> None:
    mine = {SESSION: "leaver"}
    asked = body("hello", 8000, n=15)

    def running() -> int:
        return int(two.get("/health", headers=mine).json()["running"])

    with httpx.stream("POST", two.address + CHAT, json=asked | {"stream": True}, headers=mine, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: it closes the connection when it is dropped
        next(lines)
        two.wait(lambda: running() > 0, 10)
    two.wait(lambda: running() == 0, 10)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(two.address + CHAT, json=asked, headers=mine, timeout=2)
    two.wait(lambda: running() == 0, 10)


def test_a_replica_that_dies_loses_only_the_streams_it_was_writing(two: Replicas, one: Serving) -> None:
    asked, begun = [body(str(i), 600) for i in range(12)], threading.Semaphore(0)
    headers = sessions_of(two.names(), 6)
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(streamed, two, asked[i], headers[i], begun) for i in range(8)]
        whole = [pool.submit(two.post, CHAT, asked[i], headers=headers[i]) for i in range(8, 12)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        two.processes()[0].kill()
        ended = [stream.result() for stream in streams]
        answers = [answer.result() for answer in whole]
    right = [content(one.post(CHAT, each)) for each in asked]
    failed = [code for _, code in ended]
    assert failed in ([None, _ERROR] * 4, [_ERROR, None] * 4), "every other session is of the same replica"
    for (text, code), expected in zip(ended, right, strict=False):
        assert text == expected if code is None else expected.startswith(text.rstrip("\ufffd"))
    assert [content(answer) for answer in answers] == right[8:], "nothing was sent yet: the other replica wrote them"
    two.wait(lambda: two.running() == 2)


def test_replicas_follow_the_load_without_failing_requests(two: Replicas, one: Serving) -> None:
    quick = {"target_ongoing_requests": 2, "look_back_period_s": 1, "metrics_interval_s": 0.5}
    scaling = {"autoscaling_config": {**quick, "upscale_delay_s": 0.5, "downscale_delay_s": 2}}
    two.deploy(1, 3, scaling)
    two.wait(lambda: two.running() == 1)
    asked, over = body("hello", 400), threading.Event()
    expected, answers = content(one.post(CHAT, asked)), []

    def load(until: threading.Event) -> None:
        while not until.is_set():
            answers.append(two.post(CHAT, asked))

    calm = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, over), *(pool.submit(load, calm) for _ in range(7))]
        try:
            two.wait(lambda: two.running() == 3)
            calm.set()
            two.wait(lambda: two.running() == 1)
        finally:
            calm.set()
            over.set()
        for each in loads:
            each.result()
    assert {content(answer) for answer in answers} == {expected}


def test_metrics_of_all_replicas_are_rays(running: tuple[Replicas, int]) -> None:
    replicas, port = running
    replicas.post(CHAT, body("hello"))

    def reported() -> bool:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        found = [line for line in text.splitlines() if line.startswith("ray_vllm_prompt_tokens_total{")]
        return any('model_name="' in line and 'replica="' in line and not line.endswith(" 0.0") for line in found)

    replicas.wait(reported, 40)


def hit_rate(it: Replicas, arm: str, at_random: bool) -> float:
    """Return the prefix hit rate of 12 prompts per replica, each repeated three times."""
    names, draw = it.names(), random.Random(arm)
    found: dict[int, list[dict[str, Any]]] = {i: [] for i in range(len(names))}
    for i in range(200):
        asked = body(f"{arm}{i} " + "the quick brown fox jumps. " * 24, 1, temperature=0)
        found[rank_replicas(route_of({}, json.dumps(asked).encode()), names, lambda _: 0)[0][0]].append(asked)
    prompts = [asked for group in found.values() for asked in group[:12]]
    cached = total = 0
    for turn in range(4):
        for asked in prompts:
            headers = {SESSION: str(draw.random())} if at_random else {}
            usage = it.post(CHAT, asked, headers=headers).json()["usage"]
            if turn:
                total += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached / total


def test_prefixes_are_found_at_least_twice_as_often_as_by_random_routing(two: Replicas) -> None:
    at_random, routed = hit_rate(two, "a", True), hit_rate(two, "b", False)
    print(f"prefix hit rate: {routed:.2f}, with random routing {at_random:.2f}")
    assert routed > 0.9
    assert routed >= 2 * at_random


def test_a_reply_that_fills_its_queue_ends_when_its_client_leaves(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.integrations.ray._UNSENT", 4)
    whole = json.dumps(body("hello", 8000, stream=True)).encode()
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "server": ["localhost", 80]}
    scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"application/json")]

    async def leave() -> float:
        replica = Replica.__new__(Replica)
        await replica.__init__({"model": str(model), "drafter": "none", "port": 0})
        answer = replica.answer(scope, whole, Route())
        assert (await anext(answer))[0]["status"] == 200
        await asyncio.sleep(1)  # the queue is full now
        began = time.monotonic()
        await answer.aclose()  # type: ignore[attr-defined]
        took = time.monotonic() - began
        await replica._running.aclose()
        return took

    assert asyncio.run(leave()) < 5


def test_no_application_waits_for_room_that_a_client_who_has_left_would_make() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def leave() -> None:
        replica = Replica.__new__(Replica)
        replica._running, replica._served = AsyncExitStack(), SimpleNamespace(app=application)  # type: ignore[assignment]
        answer = replica.answer({}, b"", Route())
        assert await anext(answer)
        await asyncio.sleep(0.1)  # the queue is full now
        await asyncio.wait_for(answer.aclose(), 5)  # type: ignore[attr-defined]

    asyncio.run(leave())


def test_options_are_checked_before_a_replica_starts() -> None:
    with pytest.raises(InvalidOption, match="cannot write one recording"):
        app({"model": "demo", "record": "file"})
    with pytest.raises(Exception, match="No such option: --modle"):
        app({"modle": "demo"})


def test_errors_of_ray_are_told_in_the_servers_words() -> None:
    for error, status in ((BackPressureError(5, 5), 429), (RayActorError(), 503)):
        found = known(error)
        assert found.status == status  # type: ignore[attr-defined]
        assert found.headers["Retry-After"]  # type: ignore[attr-defined]
    assert known(other := ValueError()) is other


def test_the_file_for_serve_deploy_names_the_applications_deployments() -> None:
    import yaml

    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text()))
    (given,) = config.applications
    module, name = given.import_path.split(":")
    built = build_app(getattr(import_module(module), name)(given.args), name=given.name)
    assert {one.name for one in given.deployments} == {one.name for one in built.deployments}
    assert built.ingress_deployment_name == "Front"


def test_the_manifest_for_kuberay_holds_the_same_application() -> None:
    import yaml

    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    ours = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"] == ours["applications"]


def test_requests_that_wait_for_a_replica_keep_no_other_from_being_routed() -> None:
    router = PrefixRouter.__new__(PrefixRouter)
    router._pending_requests_to_fulfill = dict.fromkeys(range(200))
    assert router.max_num_routing_tasks >= router.num_pending_requests > 0


def test_the_front_checks_what_a_server_does() -> None:
    context = parsed(application, {"port": 0, "api-key": "secret"})
    assert (settings := front_settings(context.params)).api_keys == ("secret",)
    assert not settings.hosts
    assert "localhost" in front_settings(parsed(application, {"port": 0}).params).hosts


def test_a_body_without_a_key_is_not_read() -> None:
    class Nobody:
        def options(self, **_: Any) -> None: ...

    async def receive() -> Any:
        raise AssertionError("the body was read")

    front = Front(Nobody(), Settings(api_keys=("secret",)))
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "server": ("a", 1)}
    answer = asyncio.run(front(Request(scope, receive)))
    assert answer.status_code == 401
