"""Options that several commands share, each written once, and what they mean to the library."""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from paceline.cli.grammar_options import parse_grammar
from paceline.cli.show import idle_line, sampling_line
from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling
    from paceline.types import DraftBudget

_MODEL, _DRAFT, _SAMPLING = "Model", "Speculation", "Sampling"

_LOG = logging.getLogger("paceline")
"""Receives the library's warnings; without a handler they go to stderr. Its level also says whether to be quiet."""


def _hush(quiet: bool) -> bool:
    _LOG.setLevel(logging.ERROR if quiet else logging.WARNING)
    return quiet


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=_hush, help="Only errors on stderr: no progress, no statistics, no warnings."
    ),
]
NamedModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The model; same as --model.", show_default=False)
]
"""Commands whose first argument is a model take it as --model too, and the other way round."""
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="'demo', a folder in Hugging Face layout, a GGUF file, or a hub id such as owner/name.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads; without it, torch's choice.", rich_help_panel=_MODEL),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.", rich_help_panel=_MODEL)
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HF_TOKEN",
        show_default=False,
        help="Access token for a gated or private hub model.",
        rich_help_panel=_MODEL,
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read pytorch_model.bin where there are no safetensors (tensors only, no code is run).",
        rich_help_panel=_MODEL,
    ),
]


DEMO = "demo"

_Options = TypeVar("_Options", bound="ModelOptions")


def note(text: str) -> None:
    """One line on stderr, unless --quiet."""
    if _LOG.isEnabledFor(logging.WARNING):
        typer.echo(text, err=True)


def one_model(argument: str | None, option: str) -> str:
    """The model that MODEL or --model names. Raises `InvalidOption` where they differ."""
    if argument is not None and option not in (DEMO, argument):
        raise InvalidOption(f"MODEL is {argument} and --model is {option}", "Name the model once")
    return option if argument is None else argument


def set_threads(threads: int | None) -> None:
    """Apply --threads, with a warning if it exceeds the number of cores."""
    import torch

    if threads is None:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or threads
    if threads > cores:
        note(f"warning: --threads {threads} is more than the {cores} cores available, which makes every pass slower")
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and where it runs."""

    model: ModelName = DEMO
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            help="A LoRA adapter to merge into the model: a folder in PEFT's layout or a hub id.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL)
    ] = "auto"
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.", rich_help_panel=_MODEL)] = "auto"
    revision: Revision = None
    token: Token = None
    allow_pickle: AllowPickle = False
    threads: Threads = None

    def named(self: _Options, model: str | None) -> _Options:
        """These options for a MODEL that may have been given as an argument. Raises `InvalidOption`."""
        return replace(self, model=one_model(model, self.model))

    def open(self, *, progress: bool, **more: Any) -> LLM:
        """The model, ready to write; `more`: what else `paceline.load` takes. Raises `PacelineError`."""
        import paceline.llm

        set_threads(self.threads)
        names = ("adapter", "dtype", "device", "revision", "token", "allow_pickle")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return paceline.llm.load(self.model, progress=progress, **own, **more)


@dataclass(frozen=True, slots=True)
class LoadOptions(ModelOptions):
    """Which model, where, and what drafts for it."""

    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            help="int8 or int4: hold the weights as integers; a GGUF keeps its own 4 to 8 bits with either. "
            "`paceline perplexity` says what it costs.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help="auto (suffix), none, ngram, suffix, model:REF (a small model, whatever its tokenizer; REF@ADAPTER "
            "merges a LoRA adapter into it), a head trained for the model as eagle3:REF, medusa:REF, block:REF, "
            "early-exit:REF or head:REF (any of them; eagle3 or medusa alone is the one that comes with Paceline), or "
            "early-exit:LAYERS. Several joined by '+': the first with something to say drafts. The text is the same "
            "with any of them.",
            rich_help_panel=_DRAFT,
        ),
    ] = "auto"
    draft_quantize: Annotated[
        str | None,
        typer.Option("--draft-quantize", help="int8 or int4: as --quantize, of the drafter.", rich_help_panel=_DRAFT),
    ] = None
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            help="Tokens drafted per round: auto (what is fastest here, or none), a number, or a tree as "
            "NODESxDEPTHxBRANCH, such as 16x4x2.",
            rich_help_panel=_DRAFT,
        ),
    ] = "auto"

    def load(self, *, progress: bool) -> LLM:
        """The model, ready to write. Raises `PacelineError`; an impossible draft before anything is read."""
        draft = parse_draft(self.draft)
        modes = {"quantize": self.quantize, "draft_quantize": self.draft_quantize}
        return self.open(progress=progress, drafter=self.drafter, draft=draft, **modes)


def parse_draft(text: str) -> int | DraftBudget | Literal["auto"]:
    """What --draft says. Raises `InvalidOption`."""
    if text == "auto":
        return "auto"
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if tree := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text):
        from paceline.types import DraftBudget

        return DraftBudget(*map(int, tree.groups()))
    raise InvalidOption(
        f"--draft {text!r} is not possible", "Give auto, a length, or NODESxDEPTHxBRANCH such as 16x4x2"
    )


def parse_bias(text: str) -> tuple[int, float]:
    """What one --logit-bias says: (token id, number). Raises `InvalidOption`."""
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise InvalidOption(f"--logit-bias {text!r} is not possible", "Give ID=NUMBER, such as 42=-1.5") from None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the reply is chosen and where it ends. None: not given."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "--max-tokens",
            "-n",
            help="Maximum length of a reply in tokens.",
            show_default="512",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-t",
            help="0 is greedy. Without it the model's generation_config applies, as for every sampling option; greedy "
            "if it has none.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Keep the likeliest tokens up to mass p; 1: all.", rich_help_panel=_SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help="Keep tokens at least p times as likely as the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            "--typical-p",
            help="Keep the tokens of the most typical surprise up to mass p; 1: all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="Above 1: tokens of prompt and reply become less likely.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            help="-2 to 2: taken off a token's logit for each time it is in the reply.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty",
            help="-2 to 2: taken off a token's logit once it is in the reply.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="ID=NUMBER",
            help="Add a number to this token's logit; -inf bans it. May be repeated.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    bad_word: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="Never write this text. May be repeated.", rich_help_panel=_SAMPLING),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(
            "--no-repeat-ngram-size",
            help="No n tokens in a row come twice, the prompt's included; 0: off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--min-new-tokens", help="No EOS or stop token before this many tokens.", rich_help_panel=_SAMPLING
        ),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            help="How drafted tokens are accepted: match (the default: the text never depends on the drafter), "
            "rejection or block (only its distribution does not), or typical (lossy).",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            "-s",
            help="The same seed gives the same text; without it, one is drawn.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text. May be repeated.", rich_help_panel=_SAMPLING),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="End at this token. May be repeated.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence tokens.", rich_help_panel=_SAMPLING),
    ] = False
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="SCHEMA",
            help="A JSON schema, or a file that holds one. The reply is JSON of this schema.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option("--regex", help="The reply matches this regular expression.", rich_help_panel=_SAMPLING),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            metavar="GRAMMAR",
            help="The reply is of this grammar, in llguidance's dialect of Lark.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """What was given, by `Sampling`'s names."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in own.items() if value is not None and value != []}
        for option, name in (("stop_token_id", "stop_token_ids"), ("bad_word", "bad_words")):
            if option in given:
                given[name] = given.pop(option)
        if "logit_bias" in given:
            given["logit_bias"] = dict(map(parse_bias, given["logit_bias"]))
        if forms := {name: given.pop(name) for name in ("json_schema", "regex", "grammar") if name in given}:
            given["grammar"] = parse_grammar(**forms)
        return given

    def check(self, **defaults: Any) -> None:
        """Raises `InvalidOption` for what no model could make possible."""
        from paceline.sampling.parameters import Sampling

        Sampling(**(defaults | self.changes()))

    def of(self, llm: LLM, **defaults: Any) -> Sampling:
        """The sampling for this model: what was given here, else `defaults`, else what the model recommends."""
        changes = self.changes()
        sampling = llm.sampling(**(defaults | changes))
        if sampling.temperature > 0:
            note(f"sampling: {sampling_line(sampling, changes)} (-t 0 writes greedy text)")
        elif idle := idle_line(changes):
            note(idle)
        return sampling


def progress_wanted(quiet: bool) -> bool:
    """Whether bars belong on stderr."""
    return not quiet and sys.stderr.isatty()
