"""The slots of llama.cpp's server: their list, and the actions save, restore and erase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.server.worker import WorkerLimits
from tests.support.running import Serving, serving
from tests.support.slow_llm import ENDLESS, slow_llm
from tests.support.toys import toy_llm

LIMITS = WorkerLimits(slots=2, prefix_bytes=1 << 26)
BODY = {"prompt": "abc, def. " * 30, "n_predict": 8, "id_slot": 0, "cache_prompt": True}


def over(folder: Path) -> LLM:
    """Return a model with a prefix folder, as after a start. It uses float64, so that rounding does not matter."""
    llm = toy_llm(context_length=2048)
    llm.engine.__dict__["chunk_invariant"] = True
    llm.engine.remember(1 << 26, folder, 1 << 30)
    return llm


def act(it: Serving, action: str, filename: str = "a.bin", slot: object = 0) -> tuple[int, dict[str, Any]]:
    answer = it.post(f"/slots/{slot}?action={action}", {"filename": filename})
    return answer.status_code, answer.json()


def cached(it: Serving) -> int:
    return int(it.post("/v1/completions", BODY).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_saved_prompt_is_restored_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "save_prefixes", lambda *_: None)  # a killed process writes nothing at its end
    with serving(over(tmp_path), LIMITS) as it:
        assert cached(it) == 0
        assert not [*tmp_path.iterdir()]
        status, saved = act(it, "save")
        assert status == 200
        assert saved["n_saved"] > 300
        assert saved["n_written"] == sum(file.stat().st_size for file in tmp_path.iterdir())
        assert (saved["id_slot"], saved["filename"]) == (0, "a.bin")
    with serving(over(tmp_path), LIMITS) as it:
        status, restored = act(it, "restore")
        assert (status, restored["n_restored"], restored["n_read"]) == (200, saved["n_saved"], saved["n_written"])
        assert cached(it) > 290


def test_nothing_can_be_restored_before_it_is_saved(tmp_path: Path) -> None:
    with serving(over(tmp_path), LIMITS) as it:
        status, body = act(it, "restore")
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "not_saved", "filename")


def test_a_failure_to_save_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.engine.prefix_store.write", fail)
    with serving(over(tmp_path), LIMITS) as it:
        cached(it)
        status, body = act(it, "save")
    assert (status, body["error"]["code"]) == (503, "not_saved")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\0", "a\n", "a" * 256])
def test_a_file_name_is_never_a_path(name: str, tmp_path: Path) -> None:
    with serving(over(tmp_path), LIMITS) as it:
        for action in ("save", "restore"):
            status, body = act(it, action, name)
            assert (status, body["error"]["param"]) == (400, "filename")


def test_actions_need_a_folder_of_prefixes() -> None:
    with serving(toy_llm(), LIMITS) as it:
        for action in ("save", "restore"):
            status, body = act(it, action)
            assert (status, body["error"]["code"]) == (400, "not_supported")
            assert "--prefix-dir" in body["error"]["message"]
        assert it.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": 0}


@pytest.mark.parametrize(("slot", "action", "param"), [(2, "save", "slot"), ("x", "erase", "slot"), (0, "x", "action")])
def test_a_wrong_slot_or_action_is_an_error(slot: object, action: str, param: str, tmp_path: Path) -> None:
    with serving(over(tmp_path), LIMITS) as it:
        status, body = act(it, action, slot=slot)
    assert (status, body["error"]["param"]) == (400, param)


def test_the_slots_of_llamacpp_show_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch), WorkerLimits(slots=1)) as it:
        idle = [{"id": 0, "n_ctx": 4096, "speculative": True, "is_processing": False}]
        assert it.get("/slots?fail_on_no_slot=1").json() == idle
        with it.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as answer:
            pieces = answer.iter_bytes()  # kept: dropping it would close the answer
            assert next(pieces)  # the answer may begin before the reply does
            assert it.busy()
            assert it.get("/slots").json() == [{**idle[0], "is_processing": True}]
            assert it.get("/slots?fail_on_no_slot=1").status_code == 503
        assert it.idle()
        assert it.get("/slots").json() == idle
