"""Jobs in the helper process: results, errors, limits, and cancelled work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidPrompt
from paceline.text import chat_template, sandbox
from paceline.text.chat_template import render
from paceline.text.sandbox import ABANDONED, SANDBOX, JobFailed, OverLimit, Sandbox, Unfinished, can_fork

pytestmark = [pytest.mark.forks, pytest.mark.skipif(not can_fork(), reason="processes cannot fork here")]
MESSAGES = [{"role": "user", "content": "Hi"}]
LIMITS = (0.5, 256 * 2**20)


def test_results_and_errors_come_back() -> None:
    assert SANDBOX.run("math:sqrt", 4.0, *LIMITS) == 2.0
    with pytest.raises(JobFailed, match="math domain error"):
        SANDBOX.run("math:sqrt", -1.0, *LIMITS)
    with pytest.raises(JobFailed, match="no_such_function"):
        SANDBOX.run("math:no_such_function", 1.0, *LIMITS)
    assert SANDBOX.run("builtins:len", "x" * 5_000_000, *LIMITS) == 5_000_000


@pytest.mark.parametrize(
    "code",
    [
        "'x' * 10**9",
        "[[i] for i in range(10**9)]",
        "sum(range(10**12))",
        "__import__('os').abort()",
        "'x' * 10**8",
    ],
)
def test_a_job_over_its_limits_is_ended(code: str) -> None:
    with pytest.raises(OverLimit):
        SANDBOX.run("builtins:eval", code, *LIMITS)
    assert SANDBOX.run("builtins:eval", "6 * 7", *LIMITS) == 42


def test_jobs_do_not_wait_for_each_other() -> None:
    abandoned, ended = threading.Event(), list[bool]()

    def sleep() -> None:
        ABANDONED.set(abandoned)
        try:
            SANDBOX.run("time:sleep", 600.0, 60.0, 2**28)
        except Unfinished:
            ended.append(True)

    slow = [threading.Thread(target=sleep) for _ in range(8)]
    for thread in slow:
        thread.start()
    assert SANDBOX.run("math:sqrt", 9.0, *LIMITS) == 3.0
    assert all(thread.is_alive() for thread in slow)
    abandoned.set()
    for thread in slow:
        thread.join(20)
    assert len(ended) == 8


def test_abandoned_work_ends_in_the_helper_too(tmp_path: Path) -> None:
    abandoned, file = threading.Event(), tmp_path / "pid"
    code = f"[__import__('pathlib').Path({str(file)!r}).write_text(str(__import__('os').getpid())), sum(range(10**12))]"
    context = copy_context()
    context.run(ABANDONED.set, abandoned)

    def work() -> None:
        with pytest.raises(Unfinished):
            SANDBOX.run("builtins:eval", code, 60.0, 2**28)

    thread = threading.Thread(target=context.run, args=(work,))
    thread.start()
    assert _soon(lambda: file.exists() and bool(file.read_text()))
    abandoned.set()
    thread.join(10)
    assert not thread.is_alive()
    assert _soon(lambda: not Path(f"/proc/{file.read_text()}").exists())


def test_a_helper_that_died_is_started_again() -> None:
    own = Sandbox()
    first = own.run("builtins:eval", "__import__('os').getppid()", *LIMITS)
    own.prepare("key", "math:sqrt", lambda: 1.0)
    assert own.run("math:sqrt", 4.0, *LIMITS, "key") == 2.0
    os.kill(first, signal.SIGKILL)

    def again() -> bool:
        with suppress(Unfinished):
            return bool(own.run("builtins:eval", "__import__('os').getppid()", *LIMITS) != first)
        return False

    assert _soon(again)
    with pytest.raises(Unfinished):
        own.run("math:sqrt", 4.0, *LIMITS, "key")  # what the old helper had prepared is gone
    own.prepare("key", "math:sqrt", lambda: 1.0)
    assert own.run("math:sqrt", 4.0, *LIMITS, "key") == 2.0


def test_an_answer_that_is_too_large_or_no_json_costs_nobody_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sandbox()
    helper = own.run("builtins:eval", "__import__('os').getppid()", *LIMITS)
    monkeypatch.setattr(sandbox, "_MAX_ANSWER_BYTES", 1000)
    with pytest.raises(OverLimit):
        own.run("builtins:eval", "'x' * 200_000", *LIMITS)
    with pytest.raises(JobFailed, match="not JSON serializable"):
        own.run("builtins:eval", "{1, 2}", *LIMITS)
    assert own.run("builtins:eval", "__import__('os').getppid()", *LIMITS) == helper


def test_no_processes_left_is_unfinished_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> None:
        raise BlockingIOError

    monkeypatch.setattr(sandbox.subprocess, "Popen", none_left)
    own = Sandbox()
    own.start()
    with pytest.raises(Unfinished):
        own.run("math:sqrt", 4.0, *LIMITS)
    monkeypatch.undo()
    assert own.run("math:sqrt", 4.0, *LIMITS) == 2.0


def test_preparations_of_a_helper_that_died_are_repeated() -> None:
    own = Sandbox()

    def dies() -> float:
        assert own._control
        own._forget(own._control)
        own.start()
        return 1.0

    own.start()
    own.prepare("key", "math:sqrt", dies)
    with pytest.raises(Unfinished):
        own.run("math:sqrt", 4.0, *LIMITS, "key")


def test_the_helper_ends_with_its_parent() -> None:
    code = (
        "from paceline.text.sandbox import SANDBOX; "
        "print(SANDBOX.run('builtins:eval', \"__import__('os').getppid()\", 1.0, 2**28))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert _soon(lambda: not Path(f"/proc/{int(told.stdout)}").exists())


def _soon(holds: Callable[[], Any]) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ messages[0].content * 10**9 }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{% set x = namespace(a='a') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}{{ x.a }}",
        "{{ 'a'.center(10**9) }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_without_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.5)
    with pytest.raises(InvalidPrompt, match="chat template"):
        render(template, MESSAGES, {})


def test_templates_get_their_variables() -> None:
    template = "{% generation %}{{ bos_token }}{{ messages|tojson }}{{ tools|length }}{% endgeneration %}"
    text = render(template, MESSAGES, {"bos_token": "<s>", "tools": [{"name": "f"}]})
    assert text == '<s>[{"role": "user", "content": "Hi"}]1'
    with pytest.raises(InvalidPrompt, match="no such role"):
        render("{{ raise_exception('no such role') }}", MESSAGES, {})
