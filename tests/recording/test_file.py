"""Recordings on disk: their contents, and files that are truncated, hostile or from another model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CannotWrite, InvalidData
from paceline.files import jsonl
from paceline.recording import file as recording_file
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply, parse_header, parse_reply
from paceline.sampling.parameters import Sampling
from tests.support.toys import toy_llm

HOW = Sampling(max_new_tokens=9, temperature=0.8, top_p=0.9, seed=4)


def record(path: Path, *prompts: str, how: Sampling = HOW) -> list[Any]:
    llm = toy_llm()
    with llm.record(path):
        return [llm.generate(prompt, how) for prompt in prompts]


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_replies_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    how = Sampling(
        max_new_tokens=9,
        temperature=0.8,
        seed=4,
        logit_bias={3: 1.5, 4: float("-inf")},
        stop=("xyz",),
        reasoning=("", "z"),
        thinking_budget=4,
        dry_multiplier=0.5,
        dry_sequence_breakers=(",",),
    )
    done = record(path, "hello", "well, well", how=how)
    found = Recording(path)
    assert len(found) == 2
    assert [list(reply.reply) for reply in found] == [c.token_ids for c in done]
    assert [list(reply.prompt) for reply in found] == [toy_llm().prompt_ids(text) for text in ("hello", "well, well")]
    assert [reply.finish for reply in found] == [c.finish_reason for c in done]
    assert found[0].sampling == how
    assert found.tokens == sum(len(c.token_ids) for c in done)
    assert found.header.vocab_size == 37
    assert "Infinity" not in path.read_text(), "strict JSON"


def test_a_seed_that_was_drawn_is_recorded(tmp_path: Path) -> None:
    llm = toy_llm()
    with llm.record(tmp_path / "r.jsonl"):
        done = llm.generate("hello", Sampling(max_new_tokens=9, temperature=1.0))
    (reply,) = Recording(tmp_path / "r.jsonl")
    assert reply.sampling.seed == done.stats.seed
    assert toy_llm().generate("hello", reply.sampling).token_ids == list(reply.reply)


def test_only_the_owner_can_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, "hello")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_order_is_that_in_which_replies_began(tmp_path: Path) -> None:
    llm, path = toy_llm(), tmp_path / "r.jsonl"
    hows = [replace(HOW, max_new_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    with llm.record(path):
        llm.generate(["one", "two", "three"], hows, width=3)
    assert [len(row["reply"]) for row in rows(path)[1:]] == [2, 5, 9], "as they ended"
    assert [len(reply.reply) for reply in Recording(path)] == [9, 2, 5]


def test_replies_that_cannot_be_reproduced_are_skipped(tmp_path: Path) -> None:
    llm = toy_llm()
    with llm.record(tmp_path / "r.jsonl") as recorder:
        llm.generate("hello", replace(HOW, rule="rejection"))
        llm.generate("hello", replace(HOW, processors=[lambda prefix, logits: logits]))
        llm.generate("hello", HOW, on_chunk=lambda chunk: False)
        with pytest.raises(ZeroDivisionError):
            llm.generate("hello", replace(HOW, stop_when=lambda ids, text: 1 // 0 > 0))
        llm.generate("hello", replace(HOW, stop_when=lambda ids, text: len(ids) == 3))
    assert (recorder.count, recorder.skipped) == (1, 4)
    (reply,) = Recording(tmp_path / "r.jsonl")
    assert (len(reply.reply), reply.finish) == (3, "stop")
    assert not reply.sampling.stop_when


def test_a_file_is_appended_to_only_for_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, "hello")
    record(path, "well")
    assert len(Recording(path)) == 2
    with pytest.raises(InvalidData, match="recording of another model"):
        toy_llm(layers=3).record(path)
    path.write_text("some text\n")
    with pytest.raises(InvalidData, match="line 1"):
        toy_llm().record(path)
    assert path.read_text() == "some text\n", "and is left alone"


WRITER = """
import sys
from paceline.sampling.parameters import Sampling
from tests.support.toys import toy_llm
llm = toy_llm()
llm.record(sys.argv[1])
while True:
    llm.generate("hello", Sampling(max_new_tokens=40, ignore_eos=True))
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 4000):
            time.sleep(0.01)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    whole = Recording(path)
    assert len(whole) >= 2
    assert all(len(reply.reply) == 40 for reply in whole)


def test_a_file_that_was_cut_at_any_byte_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(3):
        record(path, "hello")
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(ends[0], min(len(data), 8000), 97):
        path.write_bytes(data[:cut])
        complete = sum(end <= cut for end in ends) - 1
        assert len(Recording(path)) == complete
    path.write_bytes(data[: ends[1] + 50])
    record(path, "well")
    assert len(Recording(path)) == 2, "the torn line is gone"
    path.write_bytes(data[: ends[0] - 9])
    record(path, "well")
    assert len(Recording(path)) == 1, "so is a torn header"


def test_a_full_disk_ends_the_recording_but_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with llm.record(tmp_path / "r.jsonl") as recorder:
        monkeypatch.setattr(jsonl.Journal, "append", full)
        assert len(llm.generate("hello", replace(HOW, ignore_eos=True)).token_ids) == 9
        with pytest.raises(CannotWrite, match="No space left"):
            recorder.check()


REPLY: dict[str, Any] = {
    "prompt": [1, 2],
    "reply": [3],
    "finish": "eos",
    "sampling": {"seed": 1},
    "sample": 0,
    "started": 1.0,
}
HEADER: dict[str, Any] = {
    "paceline_recording": 1,
    "model": "m",
    "fingerprint": "ab:0",
    "vocab_size": 37,
    "context_length": 64,
    "quantize": None,
    "version": "0",
}
DEEP = '{"a":' * 100_000
HOSTILE: dict[str, tuple[Any, str]] = {
    "no object": ([], "not a JSON object"),
    "no JSON": ("{", "not valid JSON"),
    "nested": (DEEP, "nested too deeply|not valid JSON"),
    "no UTF-8": ("\udcff", "not UTF-8"),
    "no prompt": (REPLY | {"prompt": []}, "'prompt' is empty"),
    "no reply": (REPLY | {"reply": []}, "'reply' is empty"),
    "missing": ({k: v for k, v in REPLY.items() if k != "reply"}, "'reply' is missing"),
    "beyond the vocabulary": (REPLY | {"reply": [37]}, "contains 37, which is not a token id below 37"),
    "negative": (REPLY | {"prompt": [-1]}, "contains -1"),
    "a bool": (REPLY | {"prompt": [True]}, "contains True"),
    "null": (REPLY | {"prompt": [None]}, "contains None"),
    "text": (REPLY | {"prompt": "abc"}, "must be a list"),
    "floats": (REPLY | {"prompt": [1.0]}, "contains 1.0"),
    "too long": (REPLY | {"prompt": [1] * 64}, "context length of 64"),
    "beyond max_new_tokens": (
        REPLY | {"reply": [1, 2], "sampling": {"seed": 1, "max_new_tokens": 1}},
        "max_new_tokens",
    ),
    "an odd end": (REPLY | {"finish": "cancelled"}, "'finish' must be one of"),
    "an endless sample": (REPLY | {"sample": 10**12}, "'sample' must be"),
    "no time": (REPLY | {"started": "now"}, "'started' must be"),
    "no seed": (REPLY | {"sampling": {}}, "no seed"),
    "an unknown parameter": (REPLY | {"sampling": {"seed": 1, "stop_when": 1}}, "not a recorded sampling parameter"),
    "a hot temperature": (REPLY | {"sampling": {"seed": 1, "temperature": 1e9}}, "out of range"),
    "a bias of no token": (REPLY | {"sampling": {"seed": 1, "logit_bias": {"x": 1}}}, "invalid literal"),
    "a bias that is no object": (REPLY | {"sampling": {"seed": 1, "logit_bias": 3}}, "malformed"),
    "a long grammar": (REPLY | {"sampling": {"seed": 1, "grammar": {"text": "a" * 70_000}}}, "at most 65536"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_rows_are_refused_with_their_line(case: str, tmp_path: Path) -> None:
    row, message = HOSTILE[case]
    line = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "r.jsonl"
    path.write_bytes(f"{json.dumps(HEADER)}\n{json.dumps(REPLY)}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(InvalidData, match=f"r.jsonl, line 3: .*({message})"):
        Recording(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paceline_recording": 2}, "format 2"),
        ({"paceline_recording": None}, "not the header"),
        ({"vocab_size": 10**12}, "'vocab_size' must be"),
        ({"fingerprint": "x"}, "'fingerprint' must be"),
        ({"model": 3}, "'model' must be"),
    ],
)
def test_hostile_headers_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(HEADER | change) + "\n")
    with pytest.raises(InvalidData, match=f"line 1: .*{message}"):
        Recording(path)


def test_files_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(HEADER)}\n{json.dumps(REPLY)}{' ' * 5000}\n")
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    with pytest.raises(InvalidData, match="line 2: the line is longer than"):
        Recording(path)
    monkeypatch.setattr(recording_file, "_MAX_FILE_BYTES", 100)
    with pytest.raises(InvalidData, match="is larger than"):
        Recording(path)
    path.write_text("")
    with pytest.raises(InvalidData, match="is empty"):
        Recording(path)


def test_the_rows_without_the_fault_are_valid() -> None:
    header = parse_header(json.dumps(HEADER).encode())
    reply = parse_reply(json.dumps(REPLY).encode(), header)
    assert reply == RecordedReply((1, 2), (3,), "eos", Sampling(seed=1), 0, 1.0)
    assert parse_reply(json.dumps(reply.as_dict()).encode(), header) == reply
    assert header.as_dict() == HEADER
