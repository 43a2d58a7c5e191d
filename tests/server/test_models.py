"""Several models on one server: loaded on request, unloaded when idle or for memory, without waits for other models."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption, ModelNotFound, OutOfMemory
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server import models as served_models
from paceline.server.errors import ApiError
from paceline.server.models import LoadedModel, Models, ModelSource
from paceline.server.worker import Busy, ServerStopping, Worker
from tests.support.running import serving_models
from tests.support.toys import toy_llm, toy_model

ASK: Any = [{"role": "user", "content": "abc abc"}]


def worker() -> Worker:
    return Worker(LLM(toy_model(), {"suffix": Suffix()}))


class Shelf:
    """Sources of toys. `loads` are the names in order of loading. Loading a model waits for its event in `gates`."""

    def __init__(self, gib: dict[str, float], **gates: threading.Event) -> None:
        self.loads: list[str] = []
        self.gates, self.made = gates, weakref.WeakSet[LLM]()
        self.sources = [
            ModelSource((name,), lambda name=name: self.load(name), int(size * 2**30)) for name, size in gib.items()
        ]

    def load(self, name: str) -> Worker:
        self.loads.append(name)
        if name in self.gates:
            assert self.gates[name].wait(30)
        made = worker()
        self.made.add(made.llm)
        return made


def run(models: Models, work: Callable[[], Awaitable[object]]) -> None:
    async def main() -> None:
        models.start()
        try:
            await asyncio.wait_for(work(), 60)
        finally:
            await models.stop(1.0)

    asyncio.run(main())


async def use(models: Models, name: str) -> LoadedModel:
    while (model := models.take(name)) is None:
        await models.ready(name)
    return model


def loaded(models: Models) -> list[str]:
    return [source.names[0] for source in models.sources if models.get(source.names[0])]


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_a_model_is_loaded_once_for_waiting_and_later_requests() -> None:
    shelf = Shelf({"a": 1, "b": 1})
    models = Models(shelf.sources)

    async def work() -> None:
        assert loaded(models) == []
        got = await asyncio.gather(*(use(models, "a") for _ in range(5)))
        assert len(set(map(id, got))) == 1
        assert got[0].users == 5
        assert await use(models, "a") is got[0]

    run(models, work)
    assert shelf.loads == ["a"]


def test_models_that_stay_are_loaded_before_the_server_starts() -> None:
    def broken() -> Worker:
        raise ModelNotFound("there is no such file")

    with pytest.raises(ModelNotFound, match="no such file"):
        Models([ModelSource(("a",), broken, stays=True)])


def test_an_idle_model_is_unloaded_and_its_memory_is_free() -> None:
    shelf = Shelf({"a": 1})
    models = Models(shelf.sources, keep_alive=0.05)

    async def work() -> None:
        model = await use(models, "a")
        await asyncio.sleep(0.2)
        assert loaded(models) == ["a"], "it is in use"
        model.release()
        model = await use(models, "a")
        await asyncio.sleep(0.1)
        assert loaded(models) == ["a"], "it is in use again"
        model.release()
        thread = model.worker._thread
        del model
        await until(lambda: not loaded(models))
        await until(lambda: not thread.is_alive())
        await until(lambda: not shelf.made)
        (await use(models, "a")).release()

    gc.disable()  # its memory must not wait for a collection
    try:
        run(models, work)
    finally:
        gc.enable()
    assert shelf.loads == ["a", "a"]


def test_the_model_that_was_idle_for_longest_makes_room() -> None:
    shelf = Shelf({"a": 2, "b": 2, "c": 2, "small": 0.5})
    models = Models(shelf.sources, max_memory=5 << 30)

    async def work() -> None:
        for name in ("a", "b", "a", "small"):
            (await use(models, name)).release()
        assert loaded(models) == ["a", "b", "small"]
        (await use(models, "c")).release()
        assert loaded(models) == ["a", "c", "small"]

    run(models, work)


def test_a_model_that_made_room_is_not_held_by_its_timer() -> None:
    shelf = Shelf({"a": 2, "b": 2})
    models = Models(shelf.sources, keep_alive=300.0, max_memory=3 << 30)

    async def work() -> None:
        (await use(models, "a")).release()
        first = [weakref.ref(llm) for llm in shelf.made]
        (await use(models, "b")).release()
        await until(lambda: not any(llm() for llm in first))

    gc.disable()
    try:
        run(models, work)
    finally:
        gc.enable()


def test_a_request_gets_the_model_it_loaded_however_soon_that_expires() -> None:
    shelf = Shelf({"a": 1})
    models = Models(shelf.sources, keep_alive=0.0)

    async def work() -> None:
        await models.ready("a")
        await asyncio.sleep(0.1)
        model = models.take("a")
        assert model
        model.release()
        del model
        await until(lambda: not loaded(models))

    run(models, work)
    assert shelf.loads == ["a"]


def test_free_memory_counts_too() -> None:
    shelf = Shelf({"a": 2, "b": 2, "small": 0.5})
    models = Models(
        shelf.sources,
        free_memory=lambda: (3 << 30) - sum(one.size for one in models.sources if models.get(one.names[0])),
    )

    async def work() -> None:
        (await use(models, "a")).release()
        (await use(models, "small")).release()
        assert loaded(models) == ["a", "small"]
        (await use(models, "b")).release()
        assert loaded(models) == ["b", "small"]

    run(models, work)


def test_a_request_waits_for_memory_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf({"a": 2, "b": 2, "small": 0.5})
    models = Models(shelf.sources, max_memory=3 << 30)

    async def work() -> None:
        first = await use(models, "a")
        waiting = asyncio.create_task(use(models, "b"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        small = await use(models, "small")  # which fits, waits for nobody
        small.release()
        first.release()
        second = await waiting
        assert loaded(models) == ["b"], "small had been idle for longer than a"
        monkeypatch.setattr(served_models, "_MEMORY_WAIT_SECONDS", 0.05)
        with pytest.raises(Busy, match="no memory for a"):
            await use(models, "a")
        second.release()
        (await use(models, "a")).release()

    run(models, work)


def test_a_model_that_can_never_fit_is_refused() -> None:
    stays = ModelSource(("stays",), worker, 1 << 30, stays=True)
    models = Models([stays, *Shelf({"a": 2}).sources], max_memory=5 << 29)

    async def work() -> None:
        with pytest.raises(OutOfMemory, match=r"a needs 2\.0 GiB, which exceeds the memory budget by 0\.5 GiB"):
            await models.ready("a")
        assert loaded(models) == ["stays"]

    run(models, work)


def heavy() -> Worker:
    """Return a model with a drafter of 1 GiB, which is allocated but never touched."""
    drafter = Suffix()
    vars(drafter)["weights"] = torch.empty(1 << 30, dtype=torch.uint8)
    return Worker(LLM(toy_model(), {"heavy": drafter}))


def test_draft_models_are_counted_once_they_are_loaded() -> None:
    sources = [ModelSource(("a",), heavy, 1 << 29), *Shelf({"b": 1}).sources]
    models = Models(sources, max_memory=2 << 30)

    async def work() -> None:
        (await use(models, "b")).release()
        (await use(models, "a")).release()
        assert loaded(models) == ["a"], "both fit, judged only by the sizes of their files"
        (await use(models, "b")).release()
        assert loaded(models) == ["b"]

    run(models, work)


def test_a_model_that_cannot_fit_with_its_draft_model_is_refused() -> None:
    models = Models([ModelSource(("a",), heavy, 1 << 29)], max_memory=1 << 30)

    async def work() -> None:
        with pytest.raises(OutOfMemory, match=r"a needs 1\.5 GiB, which exceeds the memory budget by 0\.5 GiB"):
            await models.ready("a")

    run(models, work)


def test_the_model_that_stays_is_counted_with_its_draft_model() -> None:
    models = Models([ModelSource(("stays",), heavy, stays=True), *Shelf({"a": 1}).sources], max_memory=3 << 29)

    async def work() -> None:
        with pytest.raises(OutOfMemory, match=r"a needs 1\.0 GiB, which exceeds the memory budget by 0\.5 GiB"):
            await models.ready("a")

    run(models, work)


def test_an_error_at_loading_is_told_to_all_who_wait_and_the_next_tries_again() -> None:
    tries = []

    def load() -> Worker:
        tries.append(1)
        if len(tries) == 1:
            raise ModelNotFound("the file is gone")
        return worker()

    models = Models([ModelSource(("a",), load)])

    async def work() -> None:
        answers = await asyncio.gather(use(models, "a"), use(models, "a"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ModelNotFound, ModelNotFound]
        (await use(models, "a")).release()

    run(models, work)
    assert len(tries) == 2


def test_errors_of_server_options_are_not_client_errors() -> None:
    def load() -> Worker:
        raise InvalidOption("no drafter is called 'x'", "Choose another")

    with serving_models([ModelSource(("a",), load)]) as it:
        answer = it.post("/v1/completions", {"prompt": "abc"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "a cannot be loaded: no drafter is called 'x'. Choose another"


def test_a_client_that_stops_waiting_does_not_stop_the_others() -> None:
    gate = threading.Event()
    shelf = Shelf({"a": 1}, a=gate)
    models = Models(shelf.sources)

    async def work() -> None:
        leaving, staying = (asyncio.create_task(use(models, "a")) for _ in range(2))
        await until(lambda: shelf.loads)
        leaving.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        assert (await staying).users == 1

    run(models, work)
    assert shelf.loads == ["a"]


def test_a_server_that_stops_waits_for_no_model() -> None:
    gate = threading.Event()
    shelf = Shelf({"a": 1}, a=gate)
    models = Models(shelf.sources)

    async def work() -> None:
        waiting = asyncio.create_task(use(models, "a"))
        await until(lambda: shelf.loads)
        models.drain(0.0)
        with pytest.raises(ServerStopping):
            models.take("a")
        await models.stop(0.0)
        assert not models.alive
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(models, work)
    gate.set()


def test_names() -> None:
    models = Models([ModelSource(("a", "the/a"), worker), *Shelf({f"m{i}": 0 for i in range(30)}).sources])
    assert models.source(None) is models.source("a") is models.source("the/a")
    with pytest.raises(ApiError, match=r"not served here. Use one of 'a', 'the/a', .*'m17', \.\.\.$") as caught:
        models.source("")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    with pytest.raises(ApiError):
        Models([]).source(None)


def test_a_file_is_served_once_under_all_its_names(tmp_path: Path) -> None:
    one, other = (ModelSource((name,), worker, path=tmp_path / "m.gguf") for name in ("a", "b"))
    taken = ModelSource(("a",), worker, path=tmp_path / "another.gguf")
    models = Models([one, other, taken])
    assert models.sources == [one]
    assert models.names == ["a", "b"]
    assert models.source("a") is models.source("b") is one


def test_each_model_answers_under_its_name() -> None:
    gate = threading.Event()
    shelf = Shelf({"slow": 0}, slow=gate)
    quick = ModelSource(("quick",), worker, stays=True)
    plain = toy_llm().generate("abc abc", Sampling(max_new_tokens=12)).text
    with serving_models([quick, *shelf.sources]) as it:
        listed = {one["id"]: one["paceline"] for one in it.get("/v1/models").json()["data"]}
        assert listed["slow"] == {"loaded": False}
        assert listed["quick"]["loaded"]
        assert listed["quick"]["drafters"] == ["suffix"]
        answers: list[Any] = []

        def ask() -> None:
            answers.append(it.openai.chat.completions.create(model="slow", messages=ASK, max_tokens=12))

        waiting = threading.Thread(target=ask)
        waiting.start()
        while not shelf.loads:
            time.sleep(0.01)
        reply = it.openai.chat.completions.create(model="quick", messages=ASK, max_tokens=12)
        assert (reply.model, reply.choices[0].message.content) == ("quick", plain)
        assert waiting.is_alive(), "a reply of one model does not wait for another model"
        gate.set()
        waiting.join(30)
        assert (answers[0].model, answers[0].choices[0].message.content) == ("slow", plain)
        assert it.get("/v1/models/slow").json()["paceline"]["loaded"]
        tokens = it.post("/tokenize", {"model": "slow", "prompt": "abc"}).json()
        assert tokens["count"] == 3
        refused = it.post("/v1/chat/completions", {"model": "gpt-4", "messages": ASK})
        assert refused.status_code == 404
        assert refused.json()["error"] == {
            "message": "the model 'gpt-4' is not served here. Use one of 'quick', 'slow'",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        counted = f'vllm:prompt_tokens_total{{model_name="slow"}} {answers[0].usage.prompt_tokens}.0'
        assert counted in it.get("/metrics").text


def test_a_client_whose_time_is_up_while_its_model_is_loaded() -> None:
    gate = threading.Event()
    shelf = Shelf({"slow": 0}, slow=gate)
    with serving_models(shelf.sources) as it:
        answer = it.post("/v1/completions", {"prompt": "abc", "timeout": 0.1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        gate.set()
        assert it.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).status_code == 200
    assert shelf.loads == ["slow"]


def test_requests_that_wait_for_a_model_leave_room_for_others() -> None:
    gate = threading.Event()
    quick = ModelSource(("quick",), worker, stays=True)
    with serving_models([quick, *Shelf({"slow": 0}, slow=gate).sources], max_requests=6) as it:
        body = {"model": "slow", "prompt": "abc", "max_tokens": 2}
        answers: list[int] = []
        asking = [
            threading.Thread(target=lambda: answers.append(it.post("/v1/completions", body).status_code))
            for _ in range(6)
        ]
        for thread in asking:
            thread.start()
        end = time.monotonic() + 20
        while len(answers) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert answers == [429] * 3
        assert it.post("/v1/completions", {**body, "model": "quick"}).status_code == 200
        told = it.post("/v1/completions", body).json()["error"]
        assert told["message"] == "3 requests are already waiting for a model to be loaded"
        gate.set()
        for thread in asking:
            thread.join(30)
        assert sorted(answers) == [200] * 3 + [429] * 3


def test_a_model_whose_name_is_taken_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    models = Models([ModelSource(("base",), worker, stays=True, adapters=("sql",))])
    with caplog.at_level("WARNING"):
        models.add(ModelSource(("sql",), worker, path=Path("/models/sql.gguf")))
    assert len(models.sources) == 1
    assert "/models/sql.gguf is not served" in caplog.text
