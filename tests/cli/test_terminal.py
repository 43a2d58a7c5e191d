"""Replies, statistics and tables in terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len

from paceline.cli.show import Display, print_figures
from paceline.cli.wrapping import say
from paceline.cli.writing import _ProgressLine
from paceline.engine.detokenizer import Chunk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO) -> str:
    display = Display(file)
    for chunk in (Chunk("a", 1, "plain"), Chunk("", 2, "draft"), Chunk("b\x1b]0;\x07", 3, "draft")):
        display.write(chunk)
    display.end()
    return file.getvalue()


def test_accepted_tokens_are_green_and_no_escape_of_the_model_reaches_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(Terminal()) == "a\x1b[32mb\ufffd]0;\ufffd\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == "ab\ufffd]0;\ufffd\n"
    assert shown(io.StringIO()) == "ab\x1b]0;\x07\n"


def wrapped(monkeypatch: pytest.MonkeyPatch, width: int, *pieces: str) -> str:
    """Return the output to a terminal of this width for a reply that arrives in these pieces."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    display = Display(terminal)
    for piece in pieces:
        display.text(piece)
    display.end()
    return terminal.getvalue()


@pytest.mark.parametrize("width", [8, 11, 20, 60])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
def test_a_terminal_breaks_no_word_of_a_reply(monkeypatch: pytest.MonkeyPatch, width: int, length: int) -> None:
    text = "One two three, four.  Fivefive sixes seven eight nine ten\n\n  eleven twelve thirteen\tfourteen end"
    shown = wrapped(monkeypatch, width, *(text[i : i + length] for i in range(0, len(text), length)))
    assert shown.split() == text.split()
    assert all(cell_len(line.rstrip().expandtabs()) <= width for line in shown.split("\n"))
    assert shown.count("\n\n") == 1


def test_links_and_code_keep_their_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    link = "https://example.org/a/very/long/address"
    assert wrapped(monkeypatch, 20, "See ", link[:9], link[9:30], link[30:], " now") == f"See {link} now\n"
    code = "```py\nif a is not None and b is not None:\n```\n"
    assert wrapped(monkeypatch, 20, code, "words that go on after it") == code + "words that go on \nafter it\n"


def test_a_terminal_counts_the_columns_of_wide_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped(monkeypatch, 10, "ab ", "你好", "世界 c") == "ab \n你好世界 c\n"


def test_only_the_last_word_of_a_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    display = Display(terminal)
    display.text("im")
    assert terminal.getvalue() == "im"
    display.text("mediately " + "x" * 40)
    assert terminal.getvalue() == "immediately "
    display.text(" ")
    assert terminal.getvalue().split() == ["immediately", "x" * 40]


def test_statistics_break_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    line = "60 tokens · 31.8 tok/s · suffix: 16 % of 49 drafted accepted · cut at 60 tokens; raise -n"
    say(line)
    assert capsys.readouterr().err == line + "\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    say(line)
    shown = capsys.readouterr().err
    assert shown.split() == line.split()
    assert max(map(len, shown.splitlines())) <= 30


def test_tables_keep_names_whole_and_say_what_they_leave_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["drafter", "x plain", "tok/s", "tokens/round", "accepted to depth 1, 2, ..."]
    names = ["suffix+eagle3@24x6x4", "model:./a/small/model@16"]
    rows = [[name, "1.08 [1.00, 1.32]", "15.7", "1.18 ~", "0.08 0.02 0.01"] for name in names]
    print_figures(columns, rows, title="Title")
    whole = capsys.readouterr().out
    assert "0.08 0.02 0.01" in whole
    assert "wider" not in whole
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich: as on a terminal
    monkeypatch.setenv("COLUMNS", "60")
    print_figures(columns, rows, title="Title")
    narrow = capsys.readouterr().out
    assert all(name in narrow for name in names)
    assert narrow.count("1.08 [1.00, 1.32]") == 2
    assert "A wider terminal also shows: tokens/round | accepted to depth 1, 2, ..." in " ".join(narrow.split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow


def test_progress_on_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = _ProgressLine(2, quiet=False)
    progress.advance(5)
    progress.advance(6)
    progress.finish(1)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "2/2 prompts · 11 tokens" in err
    assert err.endswith("1 failed\n")
