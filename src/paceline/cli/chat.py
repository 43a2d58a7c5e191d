"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.background import Background
from paceline.cli.cache_room import prefix_room
from paceline.cli.commands import option, print_error
from paceline.cli.images import data_url, read_images, saved_content
from paceline.cli.options import LoadFlags, ModelArgument, Quiet, SamplingOptions, progress_wanted
from paceline.cli.prompts import STDIN, piped_prompt
from paceline.cli.show import has_colour, loaded_line, sampling_line, show_stream, summary
from paceline.cli.wrapping import say
from paceline.errors import InvalidData, InvalidOption, InvalidPrompt, PacelineError, UnsupportedModel
from paceline.text.image_part import with_images

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.engine.results import Completion
    from paceline.sampling.parameters import Sampling
    from paceline.vision.picture import Picture

_FENCE = '"""'
_MAX_FILE_BYTES = 1 << 26
_ROLES = ("system", "user", "assistant")

_HELP = f"""\
/help              show this text
/reset             start a new conversation
/system [TEXT]     set the system message; without TEXT, remove it
/set [NAME VALUE]  change a sampling parameter, such as /set temperature 0.7; without NAME, show the current values
/image FILE        show the model an image with the next message
/retry             write the last reply again; it differs only at a temperature above 0 and without --seed
/model [NAME]      continue with another model; without NAME, show the current one
/save FILE         write the conversation to a file
/load FILE         continue the conversation of a file
/stats             show the time of the last reply, and the gain from speculation
/quit              leave, like Ctrl-D
To send several lines, paste them, or write {_FENCE} before and after them.
Ctrl-C stops a reply. The part that was written stays in the conversation."""


def chat(
    argument: ModelArgument = None,
    *,
    load: LoadFlags,
    sampling: SamplingOptions,
    system: Annotated[str | None, option("System message, the first of the conversation.")] = None,
    quiet: Quiet = False,
) -> None:
    """Chat with a model in the terminal.

    The model sees the whole conversation. /help lists the commands. On a terminal, drafted tokens that the model
    accepted are green.
    """
    load = load.with_model(argument)
    if typed := _typed():
        load.located(quiet=quiet)  # a name that does not exist is reported at once
    conversation = _Chat(load, sampling, system, quiet)
    if not quiet:
        legend = "Green: drafted tokens that the model accepted. " if has_colour(sys.stdout) else ""
        say(f"{legend}/help lists the commands, Ctrl-D leaves.")
    if typed:
        conversation.open_while_typing()
    else:
        conversation.open()
    conversation.run()


def run(
    argument: ModelArgument = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="Prompt to answer. Piped text is added (</dev/null prevents this). Without either: a conversation.",
            show_default=False,
        ),
    ] = None,
    *,
    load: LoadFlags,
    sampling: SamplingOptions,
    system: Annotated[str | None, option("System message, the first of the conversation.")] = None,
    image: Annotated[
        list[str] | None,
        option("Image for the model to look at; - is stdin. Repeatable.", metavar="FILE"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt, or chat with a model in the terminal.

    With a prompt or piped text, the command writes one answer and exits. Otherwise, it works like `paceline chat`.
    """
    images, prompt = read_images(image), " ".join(words or ())
    if not image or STDIN not in image:
        prompt = piped_prompt(prompt)
    if images and not prompt:
        raise InvalidOption("--image needs a prompt", "Give the prompt as an argument; in a conversation, use /image")
    if not prompt:
        chat(argument, load=load, sampling=sampling, system=system, quiet=quiet)
        return
    conversation = _Chat(load.with_model(argument), sampling, system, quiet, keeps_prefixes=False)
    conversation.open()
    conversation.answer_once(prompt, images)


class _Chat:
    def __init__(
        self, load: LoadFlags, options: SamplingOptions, system: str | None, quiet: bool, keeps_prefixes: bool = True
    ) -> None:
        """`keeps_prefixes`: False if there will be a single message."""
        self._load, self._options, self._quiet, self._keeps_prefixes = load, options, quiet, keeps_prefixes
        self._changes: dict[str, Any] = {}
        self._more = "raise -n"
        self._opening = _system_message(system)
        self._messages = list(self._opening)
        self._images: list[Picture] = []
        self._last: Completion | None = None
        self._loading: Background | None = None

    def open(self, progress: bool = True) -> None:
        """Load the model. Print progress and a description of the model only if `progress`."""
        self._options.check()
        self._open(self._load, progress)
        self._sampling = self._options.resolve(self._llm)

    def open_while_typing(self) -> None:
        """Start loading the model in the background, so that `run` can ask for input at once."""
        self._loading = Background(lambda: self.open(progress=False))

    def _open(self, load: LoadFlags, progress: bool = True) -> None:
        """Load a model. If that fails, the previous model stays."""
        memory = prefix_room(None) / 2**30 if self._keeps_prefixes else 0.0
        llm = load.load(progress=progress and progress_wanted(self._quiet), prefix_memory=memory)
        if llm.tokenizer.chat_template is None:
            raise UnsupportedModel(
                f"{load.model} has no chat template", "Use `paceline generate --raw`, or a chat model"
            )
        self._llm, self._load = llm, load
        if progress and not self._quiet:
            say(loaded_line(load.model, llm))

    def _opened(self) -> None:
        """Wait until the model is loaded in the background. Raise the error if loading failed."""
        loading, self._loading = self._loading, None
        if loading:
            if not self._quiet and not loading.done:
                say(f"Loading {self._load.model} ...")
            loading.join()
            if not self._quiet:
                say(loaded_line(self._load.model, self._llm))

    def run(self) -> None:
        """Read and answer messages until /quit or the end of the input."""
        _edit_lines()
        self._more = "/set max_new_tokens changes the limit"
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: say(_HELP, err=False),
            "/reset": self._reset,
            "/system": self._system,
            "/set": self._set,
            "/image": self._image,
            "/retry": self._retry,
            "/model": self._model,
            "/save": self._save,
            "/load": self._read,
            "/stats": self._stats,
        }
        while (message := _read_message(self._loading)) is not None:
            if message.text:
                self._opened()
            name, _, rest = message.text.partition(" ")
            near = get_close_matches(name, [*commands, "/quit"], 1, 0.7)
            if message.fenced or not re.fullmatch(r"/\w*", name) or (rest and not near):
                if message.text:
                    self._answer(with_images(message.text, self._images))
                    self._images = []
            elif name == "/quit":
                break
            elif name not in commands:
                guess = f" Did you mean {near[0]}?" if near else ""
                say(f"There is no command {name}.{guess} /help lists the commands.", err=False)
            else:
                try:
                    commands[name](rest.strip())
                except PacelineError as error:
                    print_error(error)
                except OSError as error:
                    print_error(f"{error.filename or rest}: {error.strerror or error}")

    def answer_once(self, line: str, images: Sequence[Picture]) -> None:
        """Answer a single message."""
        if images:
            self._llm.required_vision()
        self._reply([*self._messages, {"role": "user", "content": with_images(line, images)}])

    def _reset(self, _: str) -> None:
        self._messages, self._images = list(self._opening), []
        say("This is a new conversation.", err=False)

    def _system(self, text: str) -> None:
        self._opening = _system_message(text or None)
        self._messages = [*self._opening, *(one for one in self._messages if one["role"] != "system")]
        say("The system message is set." if text else "There is no system message.", err=False)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if text:
            changes = self._changes | {name.replace("-", "_"): _value(value)}
            self._sampling = self._llm.sampling(**(self._options.given() | changes))
            self._changes = changes
        say(sampling_line(self._sampling, self._options.given() | self._changes) or "greedy", err=False)

    def _image(self, name: str) -> None:
        self._llm.required_vision()
        if not name:
            raise InvalidOption("/image needs the name of a file", "Write /image receipt.png, for example")
        [image] = read_images([name])
        self._images.append(image)
        height, width, _ = image.pixels.shape
        say(f"The next message will include this image ({width} x {height} pixels).", err=False)

    def _retry(self, _: str) -> None:
        asked = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            say("There is no reply yet.", err=False)
            return
        if self._sampling.temperature == 0:
            say("Greedy decoding always gives the same reply. To vary it, use /set temperature 0.7.")
        elif self._sampling.seed is not None:
            say("With a fixed seed, the reply is always the same. To vary it, use /set seed none.")
        line, before = self._messages[asked[-1]]["content"], self._messages
        self._messages = before[: asked[-1]]
        if not self._answer(line):
            self._messages = before

    def _model(self, name: str) -> None:
        if name:
            self._open(replace(self._load, model=name, adapter=None, revision=None, mmproj=None))
            self._sampling = self._llm.sampling(**(self._options.given() | self._changes))
        else:
            say(loaded_line(self._load.model, self._llm), err=False)

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        if not name:
            raise InvalidOption("/save needs the name of a file", "Write /save chat.json, for example")
        if path.exists():
            read_conversation(path)  # raises for any other file, so that only a conversation is overwritten
        saved = {"model": self._load.model, "messages": self._messages}
        path.write_text(json.dumps(saved, indent=1, default=data_url) + "\n", "utf-8")
        say(f"Saved in {path}.", err=False)

    def _read(self, name: str) -> None:
        self._messages = read_conversation(Path(name).expanduser())
        self._opening = [message for message in self._messages[:1] if message["role"] == "system"]
        say(f"The conversation has {len(self._messages)} messages.", err=False)

    def _stats(self, _: str) -> None:
        say(_details(self._last, self._sampling) if self._last else "There is no reply yet.", err=False)

    def _answer(self, line: str | list[dict[str, Any]]) -> bool:
        """Answer a message. Return True if there is an answer."""
        messages: list[dict[str, Any]] = [*self._messages, {"role": "user", "content": line}]
        try:
            text = self._reply(messages)
        except PacelineError as error:
            print_error(f"{error}. The message was dropped; /reset starts a new conversation")
            return False
        # A reply that was stopped before its first word is dropped, since an empty turn would confuse the model.
        if text:
            self._messages = [*messages, {"role": "assistant", "content": text}]
        return bool(text)

    def _reply(self, messages: list[dict[str, Any]]) -> str:
        with self._llm.stream(messages, self._sampling) as stream:
            try:
                show_stream(stream, sys.stdout, progress_wanted(self._quiet))
            except KeyboardInterrupt:
                stream.close()
        self._last = stream.completion
        if not self._quiet:
            say(summary(self._last, self._sampling, self._more))
        return self._last.text


def _system_message(text: str | None) -> list[dict[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _value(text: str) -> Any:
    """Parse the value of a parameter: a number, true, a list, or text. "none" means None."""
    try:
        return None if text == "none" else json.loads(text)
    except ValueError:
        return text


def read_conversation(path: Path) -> list[dict[str, Any]]:
    """Read the messages of a file that /save has written.

    Raises:
        InvalidData: If the file contains anything else.
        InvalidPrompt: If an image in it cannot be read.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    try:
        messages = json.loads(data if len(data) <= _MAX_FILE_BYTES else "")["messages"]
        found = [{"role": one["role"], "content": saved_content(one["content"])} for one in messages]
        if all(one["role"] in _ROLES for one in found):
            return found
    except InvalidPrompt:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InvalidData(f"{path} contains no conversation", "Use a file that /save has written")


def _edit_lines() -> None:
    """Add line editing, history and multi-line paste to input(). Windows has its own, and no readline module."""
    with contextlib.suppress(ImportError):
        import readline

        # Python turns bracketed paste off. With it, line breaks in pasted text do not end the input.
        readline.parse_and_bind("set enable-bracketed-paste on")


class _ChatInput(NamedTuple):
    """A message or a command. `fenced` is True for text between fences, which is never a command."""

    text: str
    fenced: bool = False


def _read_message(loading: Background | None = None) -> _ChatInput | None:
    """Read the next message. Return None at the end of the input, and an empty message after Ctrl-C.

    If `loading` fails meanwhile, raise its error.
    """
    try:
        with loading.interrupting() if loading else contextlib.nullcontext():
            line = _read_line("> ").strip()
        return _read_fenced(line.removeprefix(_FENCE)) if line.startswith(_FENCE) else _ChatInput(line)
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        say("\n(Ctrl-D or /quit leaves)")
    except UnicodeDecodeError:
        print_error("the line is not text in the terminal's encoding; type it again")
    return _ChatInput("")


def _read_line(prompt: str) -> str:
    return input(prompt if _typed() else "")


def _typed() -> bool:
    """Return True if a person types the input."""
    return sys.stdin.isatty()


def _read_fenced(text: str) -> _ChatInput:
    """Read up to the closing fence or to the end of the input. `text` is the first line."""
    with contextlib.suppress(EOFError):
        while not text.endswith(_FENCE):
            text += "\n" + _read_line("... ")
    return _ChatInput(text.removesuffix(_FENCE).strip("\n"), fenced=True)


def _details(reply: Completion, sampling: Sampling) -> str:
    stats = reply.stats
    parts = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in stats.seconds.items())
    depths = ", ".join(map(str, stats.accepted_at)) or "none"
    return f"{summary(reply, sampling)}\n{parts}\nrounds that accepted at least 1, 2, ... draft tokens: {depths}"
