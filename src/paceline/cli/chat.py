"""`paceline chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli.errors import complain
from paceline.cli.options import LoadOptions, NamedModel, Quiet, SamplingOptions, progress_wanted
from paceline.cli.show import Display, in_colour, summary
from paceline.errors import PacelineError, UnsupportedModel

if TYPE_CHECKING:
    from paceline.engine.results import Completion
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling

_FENCE = '"""'

_HELP = f"""\
/help    this text
/reset   forget the conversation
/stats   what the last reply cost, and what speculation gave
/quit    leave; Ctrl-D does too
A message of several lines: paste it, or put {_FENCE} before and after it.
Ctrl-C stops a reply; what was written of it stays in the conversation."""


def chat(
    named: NamedModel = None,
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option("--system", help="The system message, first in the chat.")] = None,
    quiet: Quiet = False,
) -> None:
    """Talk with the model. It sees the whole conversation; /help lists the commands.

    On a terminal, tokens that were drafted and accepted are green.
    """
    load = load.named(named)
    sampling.check()
    llm = load.load(progress=progress_wanted(quiet))
    if llm.tokenizer.chat_template is None:
        raise UnsupportedModel(f"{load.model} has no chat template", "Use `paceline generate --raw`, or a chat model")
    how = sampling.of(llm)
    if not quiet:
        legend = "Green: drafted tokens that the model accepted. " if in_colour(sys.stdout) else ""
        typer.echo(f"{legend}/help lists the commands, Ctrl-D leaves.", err=True)
    _Chat(llm, how, system, quiet).run()


class _Chat:
    def __init__(self, llm: LLM, sampling: Sampling, system: str | None, quiet: bool) -> None:
        self._llm, self._sampling, self._quiet = llm, sampling, quiet
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._last: Completion | None = None

    def run(self) -> None:
        """Until /quit or the end of the input."""
        _edit_lines()
        while (said := _ask()) is not None:
            if said.text == "/quit" and not said.block:
                break
            if re.fullmatch(r"/\w*", said.text) and not said.block:
                self._command(said.text)
            elif said.text:
                self._answer(said.text)

    def _command(self, line: str) -> None:
        if line == "/help":
            typer.echo(_HELP)
        elif line == "/reset":
            self._messages = list(self._opening)
            typer.echo("The conversation is forgotten.")
        elif line == "/stats":
            typer.echo(_details(self._last, self._sampling) if self._last else "There is no reply yet.")
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
        self._last = stream.completion
        if not self._quiet:
            typer.echo(summary(self._last, self._sampling), err=True)
        return self._last.text


def _edit_lines() -> None:
    """Line editing, history and pasting for input(). Windows has no such module and needs none."""
    with contextlib.suppress(ImportError):
        import readline

        # Python turns this off. With it the newlines of pasted text do not end the line.
        readline.parse_and_bind("set enable-bracketed-paste on")


class _Said(NamedTuple):
    """A message or a command. `block`: it stood between fences, where nothing is a command."""

    text: str
    block: bool = False


def _ask() -> _Said | None:
    """The next message; None at the end of the input, an empty one where Ctrl-C abandoned it."""
    try:
        line = _line("> ").strip()
        return _block(line.removeprefix(_FENCE)) if line.startswith(_FENCE) else _Said(line)
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo("\n(Ctrl-D or /quit leaves)", err=True)
    except UnicodeDecodeError:
        complain("the line is not text in the terminal's encoding; type it again")
    return _Said("")


def _line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _block(text: str) -> _Said:
    """Read up to the closing fence, or to the end of the input. `text`: the block's first line."""
    with contextlib.suppress(EOFError):
        while not text.endswith(_FENCE):
            text += "\n" + _line("... ")
    return _Said(text.removesuffix(_FENCE).strip("\n"), block=True)


def _details(reply: Completion, sampling: Sampling) -> str:
    stats = reply.stats
    parts = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in stats.seconds.items())
    depths = ", ".join(map(str, stats.accepted_at)) or "none"
    return f"{summary(reply, sampling)}\n{parts}\nrounds that accepted 1, 2, ... draft tokens: {depths}"
