"""`paceline chat`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from paceline.cli.background import Background
from paceline.cli.chat import read_conversation
from paceline.cli.options import LoadFlags
from paceline.errors import InvalidData
from paceline.llm import LLM
from tests.support.toy_cli import (
    Letters,
    Shop,
    chat,
    failure,
    run,
    stop_after,
)


@pytest.fixture
def asked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Return the list that receives the model's conversations."""
    seen: list[list[dict[str, str]]] = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, *args: Any, **options: Any) -> Any:
        seen.append(list(prompt))
        return stream(self, prompt, *args, **options)

    monkeypatch.setattr(LLM, "stream", noted)
    return seen


def test_chat_keeps_its_history_and_forgets_it_when_told(asked: list[list[dict[str, str]]]) -> None:
    result = chat("one\n\ntwo\n/reset\n/tmp/x is a path\n/quit\nnever\n", "--system", "be brief")
    assert result.exit_code == 0, result.output
    system = {"role": "system", "content": "be brief"}
    assert [[m["content"] for m in c if m["role"] != "assistant"] for c in asked] == [
        ["be brief", "one"],
        ["be brief", "one", "two"],
        ["be brief", "/tmp/x is a path"],
    ]
    assert asked[1][:2] == [system, {"role": "user", "content": "one"}]
    assert asked[1][2]["role"] == "assistant"
    assert asked[1][2]["content"] in result.stdout
    assert "\x1b" not in result.output


def test_only_a_conversation_keeps_its_earlier_texts(shop: Shop) -> None:
    assert chat("one\n").exit_code == 0
    assert run("run", "demo", "one").exit_code == 0
    memory = [call["prefix_memory"] for call in shop.calls]
    assert memory[0] >= 1
    assert memory[1] == 0


def test_a_conversation_shows_its_prompt_while_the_model_loads(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    typing, load = threading.Event(), LoadFlags.load

    def load_later(*args: Any, **options: Any) -> LLM:
        assert typing.wait(60)
        return load(*args, **options)

    def type_line(prompt: str) -> str:
        typing.set()
        return input(prompt)

    monkeypatch.setattr(LoadFlags, "load", load_later)
    module = sys.modules["paceline.cli.chat"]  # the package has a function of this name
    monkeypatch.setattr(module, "_typed", lambda: True)
    monkeypatch.setattr(module, "_read_line", type_line)
    result = chat("/stats\nhi\n")
    assert result.exit_code == 0, result.output
    for part in ("There is no reply yet", "drafter", "8 tokens"):
        assert part in result.output


def test_a_model_that_fails_to_load_ends_the_wait_for_a_message() -> None:
    reading = threading.Event()

    def fail() -> None:
        assert reading.wait(60)
        raise InvalidData("the file is damaged", "Fetch it again")

    def read() -> None:
        reading.set()
        time.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        loading = Background(fail)
        with pytest.raises(InvalidData, match="damaged"), loading.interrupting():
            read()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(InvalidData, match="damaged"):
        loading.join()


def test_chat_commands(shop: Shop) -> None:
    result = chat("/stats\n/help\n/nonsense\nhi\n/stats\n")
    assert result.exit_code == 0
    for part in ("There is no reply yet", "Ctrl-C stops a reply", "no command /nonsense", "prefill", "8 tokens"):
        assert part in result.stdout


def test_a_mistyped_command_is_not_sent_to_the_model(asked: list[list[dict[str, str]]], tmp_path: Path) -> None:
    result = chat(f"/modle other\n/tmp is a folder\n/load {tmp_path / 'none.json'}\n")
    assert "There is no command /modle. Did you mean /model?" in result.stdout
    assert [one[-1]["content"] for one in asked] == ["/tmp is a folder"]
    assert f"error: {tmp_path / 'none.json'}: No such file or directory" in result.output


def test_several_lines_are_one_message(asked: list[list[dict[str, str]]]) -> None:
    result = chat('"""one\n\n  two\n"""\n"""/quit"""\n"""\n/reset\n"""\n"""three\nfour')
    assert result.exit_code == 0, result.output
    said = [m["content"] for m in asked[-1] if m["role"] == "user"]
    assert said == ["one\n\n  two", "/quit", "/reset", "three\nfour"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_pasted_lines_are_one_message() -> None:
    import pty
    import readline

    if "GNU" not in (readline.__doc__ or ""):
        pytest.skip("libedit takes pasted lines one by one")
    code = "from paceline.cli.chat import _edit_lines, _read_message as read; _edit_lines(); print(repr(read().text))"
    main, terminal = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as screen:
        command = [sys.executable, "-c", code]
        child = subprocess.Popen(command, stdin=terminal, stdout=terminal, env=os.environ | {"TERM": "xterm"})
        os.close(terminal)
        shown = b""
        while b"> " not in shown:
            shown += screen.read(1024)
        os.write(main, b"\x1b[200~one\n  two\n\nthree\x1b[201~\r")
        with contextlib.suppress(OSError):  # what Linux says once the other end is closed
            while piece := screen.read(1024):
                shown += piece
        assert child.wait(60) == 0
    assert b"'one\\n  two\\n\\nthree'" in shown


def test_ctrl_c_stops_the_reply_and_not_the_chat(
    asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 3, KeyboardInterrupt())
    result = chat("one\ntwo\n")
    assert result.exit_code == 0
    assert len(asked[1][1]["content"]) == 3
    assert asked[1][2] == {"role": "user", "content": "two"}


def test_a_question_that_fails_is_dropped(asked: list[list[dict[str, str]]]) -> None:
    result = chat(f"one\n{'x' * 300}\ntwo\n", "-q")
    assert result.exit_code == 0
    assert failure_lines(result) == 1
    assert [m["content"] for m in asked[2] if m["role"] == "user"] == ["one", "two"]


def failure_lines(result: Result) -> int:
    return result.stderr.count("error: the prompt has")


def test_chat_needs_a_template(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "chat_template", None)
    assert "no chat template" in failure(chat("hi\n", "-q"))


def said(conversation: list[dict[str, str]]) -> list[str]:
    return [m["content"] for m in conversation if m["role"] != "assistant"]


def test_the_system_message_can_change(asked: list[list[dict[str, str]]]) -> None:
    result = chat("/system be brief\none\n/system be long\ntwo\n/system\nthree\n")
    assert [said(one) for one in asked] == [["be brief", "one"], ["be long", "one", "two"], ["one", "two", "three"]]
    assert "There is no system message." in result.stdout


def test_sampling_can_change(asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    result = chat(
        "/set temperature 0.7\n/set max-new-tokens 3\none\n/stats\n/set temprature 1\n/set top_p 7\n/set\n", "-s", "1"
    )
    assert result.exit_code == 0
    assert "3 tokens" in result.stdout
    assert "Did you mean temperature?" in result.stderr
    assert "top_p=7 is out of range" in result.stderr
    assert result.stdout.rstrip().endswith("temperature 0.7"), "a mistake changes nothing"


def test_a_reply_is_written_again(asked: list[list[dict[str, str]]]) -> None:
    result = chat("/retry\none\ntwo\n/set temperature 1\n/retry\nthree\n")
    assert "There is no reply yet." in result.stdout
    assert [said(one) for one in asked] == [["one"], ["one", "two"], ["one", "two"], ["one", "two", "three"]]
    assert len(asked[3]) == 5, "the reply that was written again is in the conversation, the first is not"


def test_run_says_that_its_reply_was_cut(shop: Shop) -> None:
    assert "cut at 8 tokens; raise -n" in run("run", "demo", "one", "-n", "8").stderr


def test_retry_says_when_the_text_will_be_the_same(asked: list[list[dict[str, str]]]) -> None:
    assert "/set temperature 0.7" in chat("one\n/retry\n").stderr
    assert "/set seed none" in chat("one\n/retry\n", "-t", "1", "-s", "3").stderr
    free = chat("one\n/retry\n", "-t", "1").stderr
    assert "same text" not in free
    assert len(asked) == 6


def test_a_conversation_is_saved_and_loaded(asked: list[list[dict[str, str]]], tmp_path: Path) -> None:
    path, other = tmp_path / "c.json", tmp_path / "notes.txt"
    other.write_text("dear diary")
    result = chat(
        f"one\n/save {path}\n/save {other}\n/save\n/reset\n/load {path}\ntwo\n/save {path}\n", "--system", "be brief"
    )
    assert result.exit_code == 0
    assert said(asked[1]) == ["be brief", "one", "two"]
    assert other.read_text() == "dear diary"
    assert f"{other} contains no conversation" in result.stderr
    assert "/save needs the name" in result.stderr
    assert [m["role"] for m in read_conversation(path)] == ["system", *["user", "assistant"] * 2]
    assert "No such file" in chat(f"/load {tmp_path / 'none'}\n").stderr


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"messages": [{"role": "tool", "content": "x"}]}', '{"messages": [7]}', "[" * 9999]
)
def test_files_without_a_conversation_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(InvalidData, match="contains no conversation"):
        read_conversation(tmp_path / "c")


def test_the_model_can_change(asked: list[list[dict[str, str]]], shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    result = chat("one\n/model other\ntwo\n/model\n", "--model", "first")
    assert [call["model"] for call in shop.calls] == ["first", "other"]
    assert said(asked[1]) == ["one", "two"]
    assert "other (drafter: suffix)" in result.stdout
    assert "first (drafter: suffix)" in result.stderr
    monkeypatch.setattr(Letters, "chat_template", None)
    assert "no chat template" in failure(chat("hi\n", "-q"))
