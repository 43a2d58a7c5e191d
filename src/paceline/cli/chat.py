"""`paceline chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli.commands import option, print_error
from paceline.cli.options import LoadOptions, ModelArgument, Quiet, SamplingOptions, progress_wanted
from paceline.cli.show import Display, has_colour, summary
from paceline.errors import PacelineError, UnsupportedModel

if TYPE_CHECKING:
    from paceline.engine.results import Completion
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling

_FENCE = '"""'

_HELP = f"""\
/help    show this text
/reset   start a new conversation
/stats   show the time that the last reply took, and the gain from speculation
/quit    leave; Ctrl-D does too
To send several lines, paste them, or put {_FENCE} before and after them.
Ctrl-C stops a reply; the part that was written stays in the conversation."""


def chat(
    argument: ModelArgument = None,
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, option("System message, the first of the conversation.")] = None,
    quiet: Quiet = False,
) -> None:
    """Chat with a model in the terminal.

    The model sees the whole conversation; /help lists the commands. On a terminal, drafted tokens that the model
    accepted are green.
    """
    load = load.with_model(argument)
    sampling.check()
    llm = load.load(progress=progress_wanted(quiet))
    if llm.tokenizer.chat_template is None:
        raise UnsupportedModel(f"{load.model} has no chat template", "Use `paceline generate --raw`, or a chat model")
    parameters = sampling.resolve(llm)
    if not quiet:
        legend = "Green: drafted tokens that the model accepted. " if has_colour(sys.stdout) else ""
        typer.echo(f"{legend}/help lists the commands, Ctrl-D leaves.", err=True)
    _Chat(llm, parameters, system, quiet).run()


class _Chat:
    def __init__(self, llm: LLM, sampling: Sampling, system: str | None, quiet: bool) -> None:
        self._llm, self._sampling, self._quiet = llm, sampling, quiet
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._last: Completion | None = None

    def run(self) -> None:
        """Read and answer messages until /quit or the end of the input."""
        _edit_lines()
        while (message := _read_message()) is not None:
            if message.text == "/quit" and not message.fenced:
                break
            if re.fullmatch(r"/\w*", message.text) and not message.fenced:
                self._command(message.text)
            elif message.text:
                self._answer(message.text)

    def _command(self, line: str) -> None:
        if line == "/help":
            typer.echo(_HELP)
        elif line == "/reset":
            self._messages = list(self._opening)
            typer.echo("This is a new conversation.")
        elif line == "/stats":
            typer.echo(_details(self._last, self._sampling) if self._last else "There is no reply yet.")
        else:
            typer.echo(f"There is no command {line}; /help lists the commands.")

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._reply(messages)
        except PacelineError as error:
            print_error(f"{error}. The message was dropped; /reset starts a new conversation")
            return
        # A reply stopped before its first word leaves no trace: an empty turn would only confuse the model.
        if text:
            self._messages = [*messages, {"role": "assistant", "content": text}]

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
    """Give input() line editing, history and multi-line paste. Windows has its own and no such module."""
    with contextlib.suppress(ImportError):
        import readline

        # Python turns this off. With it, line breaks in pasted text do not end the line.
        readline.parse_and_bind("set enable-bracketed-paste on")


class _ChatInput(NamedTuple):
    """Message or command. `fenced`: it stood between fences, where nothing is a command."""

    text: str
    fenced: bool = False


def _read_message() -> _ChatInput | None:
    """Return the next message: None at the end of the input, an empty one after Ctrl-C."""
    try:
        line = _read_line("> ").strip()
        return _read_fenced(line.removeprefix(_FENCE)) if line.startswith(_FENCE) else _ChatInput(line)
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo("\n(Ctrl-D or /quit leaves)", err=True)
    except UnicodeDecodeError:
        print_error("the line is not text in the terminal's encoding; type it again")
    return _ChatInput("")


def _read_line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _read_fenced(text: str) -> _ChatInput:
    """Read up to the closing fence, or to the end of the input. `text`: the first line."""
    with contextlib.suppress(EOFError):
        while not text.endswith(_FENCE):
            text += "\n" + _read_line("... ")
    return _ChatInput(text.removesuffix(_FENCE).strip("\n"), fenced=True)


def _details(reply: Completion, sampling: Sampling) -> str:
    stats = reply.stats
    parts = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in stats.seconds.items())
    depths = ", ".join(map(str, stats.accepted_at)) or "none"
    return f"{summary(reply, sampling)}\n{parts}\nrounds that accepted at least 1, 2, ... draft tokens: {depths}"
