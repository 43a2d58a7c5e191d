"""`paceline chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.failures import complain
from paceline.cli.options import LoadOptions, Quiet, SamplingOptions, progress_wanted
from paceline.cli.show import Display, in_colour, summary
from paceline.errors import PacelineError, UnsupportedModel

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling import Sampling
    from paceline.stats import Stats

_HELP = """\
/help    this text
/reset   forget the conversation
/stats   what the last reply cost, and what speculation gave
/quit    leave; Ctrl-D does too
Ctrl-C stops a reply; what was written of it stays in the conversation."""


def chat(
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option("--system", help="The system message, first in the chat.")] = None,
    quiet: Quiet = False,
) -> None:
    """Talk with the model. It sees the whole conversation; /help lists what else can be said.

    On a terminal, tokens that were drafted and accepted are green.
    """
    sampling.check()
    llm = load.load(progress=progress_wanted(quiet))
    if llm.tokenizer.chat_template is None:
        raise UnsupportedModel(f"{load.model} has no chat template", "Use `paceline generate --raw`, or a chat model")
    if not quiet:
        legend = "Green: drafted tokens that the model accepted. " if in_colour(sys.stdout) else ""
        typer.echo(f"{legend}/help lists the commands, Ctrl-D leaves.", err=True)
    _Chat(llm, sampling.of(llm), system, quiet).run()


class _Chat:
    def __init__(self, llm: LLM, sampling: Sampling, system: str | None, quiet: bool) -> None:
        self._llm, self._sampling, self._quiet = llm, sampling, quiet
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._last: Stats | None = None

    def run(self) -> None:
        """Until /quit or the end of the input."""
        # Line editing and history for input(); Windows has no such module and needs none.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        while (line := _ask()) is not None and line != "/quit":
            if re.fullmatch(r"/\w*", line):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/help":
            typer.echo(_HELP)
        elif line == "/reset":
            self._messages = list(self._opening)
            typer.echo("The conversation is forgotten.")
        elif line == "/stats":
            typer.echo(_details(self._last) if self._last else "There is no reply yet.")
        else:
            typer.echo(f"There is no command {line}; /help lists them.")

    def _answer(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._reply(asked)
        except PacelineError as error:
            complain(f"{error}. The question was dropped; /reset starts afresh")
            return
        # A reply stopped before its first word leaves no trace: an empty turn would only confuse the model.
        if text:
            self._messages = [*asked, {"role": "assistant", "content": text}]

    def _reply(self, messages: list[dict[str, str]]) -> str:
        display = Display(sys.stdout)
        with self._llm.stream(messages, self._sampling) as stream:
            try:
                for chunk in stream:
                    display.write(chunk)
            except KeyboardInterrupt:
                stream.close()
            finally:
                display.end()
        self._last = stream.completion.stats
        if not self._quiet:
            typer.echo(summary(self._last, sampled=self._sampling.temperature > 0), err=True)
        return stream.completion.text


def _ask() -> str | None:
    """The next line; None at the end of the input. "" for one that was abandoned with Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo("\n(Ctrl-D or /quit leaves)", err=True)
    except UnicodeDecodeError:
        complain("the line is not text in the terminal's encoding; type it again")
    return ""


def _details(stats: Stats) -> str:
    parts = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in stats.seconds.items())
    depths = ", ".join(map(str, stats.accepted_at)) or "none"
    return f"{summary(stats, sampled=True)}\n{parts}\nrounds that accepted 1, 2, ... draft tokens: {depths}"
