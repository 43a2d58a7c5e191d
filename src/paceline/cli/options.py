"""Options that several commands share, and their conversion to arguments of the library."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from paceline.cli.adapters import parse_adapters
from paceline.cli.commands import option, options_of
from paceline.cli.show import ignored_line, sampling_line
from paceline.cli.wrapping import say
from paceline.errors import InvalidOption
from paceline.files.gc_pause import gc_paused

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.llm import LLM
    from paceline.sampling.grammar import Grammar
    from paceline.sampling.parameters import Sampling
    from paceline.sampling.thinking import ThinkingBudget
    from paceline.types import DraftBudget

DEMO = "demo"

_LOG = logging.getLogger("paceline")
"""Logger of the library. Its warnings go to stderr; --quiet raises its level."""

_model = partial(option, panel="Model and memory")
_speculation = options_of("Speculation")
_length = options_of("Length and stopping")
_sampling = options_of("Sampling")
_penalty = options_of("Penalties and bans")
_structure = options_of("Structured output")


def _set_log_level(quiet: bool) -> bool:
    _LOG.setLevel(logging.ERROR if quiet else logging.WARNING)
    return quiet


Quiet = Annotated[
    bool, option("Print only errors on stderr: no progress, statistics or warnings.", "-q", callback=_set_log_level)
]
AsJson = Annotated[bool, option("Print one JSON object instead of text.", "--json")]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Model; the same as --model.", show_default=False)
]
ModelName = Annotated[
    str,
    _model(
        "demo, a Hugging Face folder, a GGUF file or a hub id (owner/name).\n\nYou can also use a short name such as "
        "qwen3:0.6b, a hub id with the quantisation of a GGUF file (owner/name:Q8_0), or any name that `paceline list "
        "--all` shows.",
        "-m",
        metavar="MODEL",
        envvar="PACELINE_MODEL",
    ),
]
DataType = Annotated[str, _model("Precision: auto, float32, bfloat16 or float16.", metavar="DTYPE")]
Device = Annotated[str, _model("Device: auto, cpu, cuda or mps.", metavar="DEVICE")]
DeviceMap = Annotated[
    str | None,
    _model(
        "Split the layers over several devices: auto, or a map such as cuda:0=20,cpu.\n\nauto fills the GPUs first, "
        "then the CPU. A map gives each device a number of layers. If the last count is omitted, that device takes "
        "the remaining layers.",
        metavar="MAP",
    ),
]
Threads = Annotated[int | None, _model("Number of CPU threads.", min=1, show_default="torch's choice")]
Revision = Annotated[str | None, _model("Branch, tag or commit of a hub model.", metavar="NAME")]
Token = Annotated[
    str | None,
    _model("Access token for a gated or private hub model.", metavar="TOKEN", envvar="HF_TOKEN", show_default=False),
]
AllowPickle = Annotated[
    bool, _model("Read pytorch_model.bin if there are no safetensors (tensors only; no code is run).")
]
Quantize = Annotated[
    str,
    _model(
        "Quantise weights to integers: auto, none, int8 or int4.\n\nauto keeps a GGUF file's own 2- to 8-bit codes (as "
        "int8 and int4 do) and does not change other weights. none, or an explicit --dtype, converts the codes to "
        "floats. `paceline perplexity` measures the loss of quality.",
        metavar="MODE",
    ),
]
KeyValueType = Annotated[
    str,
    _model(
        "Type of cached keys and values: auto, bf16, f16, f32 or int8.\n\nauto is the model's dtype. int8 takes 56 % "
        "of the memory that bf16 takes. The text then differs from the text with bf16, but it still does not depend "
        "on the drafter. `paceline perplexity` measures the loss of quality.",
        metavar="TYPE",
    ),
]
ChatTemplate = Annotated[
    str | None,
    _model(
        "Chat template to use instead of the model's own: FILE or NAME.\n\nNAME is one of the model's named "
        "templates, such as tool_use. By default, chats with tools use tool_use.",
        metavar="TEMPLATE",
    ),
]
VisionFile = Annotated[
    Path | None,
    _model(
        "File with the vision tower of a GGUF model, needed for images.\n\nBy default, a file named mmproj in the "
        "same folder is used.",
        "--mmproj",
        metavar="FILE",
    ),
]
DraftQuantize = Annotated[
    str,
    option(
        "Quantise the drafter's weights, as --quantize does for the model. auto uses 4 bits for draft models, and for "
        "EAGLE heads of quantised models.",
        panel="Speculation",
        metavar="MODE",
    ),
]
DraftVocab = Annotated[
    str,
    option(
        "Tokens that a draft model or EAGLE head can draft: auto, a number or FILE.\n\n0 means all tokens. FILE "
        "contains answers of the model (JSONL, as `paceline train` writes them), and its most frequent tokens are "
        "used. auto uses the 49,152 lowest ids if the vocabulary has more than 65,536 tokens.",
        panel="Speculation",
        metavar="SIZE",
    ),
]

_Options = TypeVar("_Options", bound="ModelOptions")
Number = TypeVar("Number", int, float)


def note(text: str) -> None:
    """Print a line on stderr, unless --quiet was given."""
    if _LOG.isEnabledFor(logging.WARNING):
        say(text)


def progress_wanted(quiet: bool) -> bool:
    """Return True if progress bars should be shown on stderr."""
    return not quiet and sys.stderr.isatty()


def model_name(argument: str | None, option_value: str) -> str:
    """Return the model that MODEL or --model names. Raise `InvalidOption` if they differ."""
    if argument is not None and option_value not in (DEMO, argument):
        raise InvalidOption(f"MODEL is {argument} but --model is {option_value}", "Name the model once")
    return option_value if argument is None else argument


def processes() -> int:
    """Return the number of processes that torchrun started to share a model, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def follows() -> bool:
    """Return True if this process only computes for another process, which reads the prompts."""
    return processes() > 1 and os.environ["RANK"] != "0"


def import_torch() -> None:
    """Import torch with the garbage collector paused. Collections would free nothing, but take a tenth of the time."""
    with gc_paused():
        import torch  # noqa: F401


def set_threads(threads: int | None) -> None:
    """Apply --threads, with a warning if it exceeds the number of cores."""
    import torch

    from paceline.kernels.threads import cores, limit_threads

    if threads is None:
        return
    if threads > (most := cores()):
        note(f"warning: --threads {threads} is more than the {most} cores available, which slows down every pass")
    limit_threads()  # call it first, because it would lower the number that is set below
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and the devices to run it on."""

    model: ModelName = DEMO
    adapter: Annotated[
        list[str] | None,
        _model(
            "LoRA adapter: a PEFT folder or a hub id; NAME=ADAPTER is not merged. Repeatable.\n\nAn adapter without a "
            "name is merged into the model. Named adapters stay separate: a request to a server selects one by giving "
            "its name as the model, and all other replies use the first one. JSON describes a sum of adapters: "
            '{"name": "mix", "path": ["DIR", "DIR"], "weights": [0.7, 0.3], "drafter": "ngram"}.',
            metavar="ADAPTER",
        ),
    ] = None
    dtype: DataType = "auto"
    device: Device = "auto"
    revision: Revision = None
    token: Token = None
    allow_pickle: AllowPickle = False
    threads: Threads = None
    device_map: DeviceMap = None
    kv_type: KeyValueType = "auto"

    def with_model(self: _Options, argument: str | None) -> _Options:
        """Return these options with the model of the MODEL argument, if given. Raise `InvalidOption` on a conflict."""
        return replace(self, model=model_name(argument, self.model))

    def located(self, *, quiet: bool = False) -> Path:
        """Return the model's file or folder. Download it if necessary, with progress bars unless `quiet`."""
        from paceline.files.locate import resolve

        fetch: dict[str, Any] = {"token": self.token, "quiet": quiet, "allow_pickle": self.allow_pickle}
        return resolve(self.model, revision=self.revision, **fetch)

    def open(self, *, progress: bool, **more: Any) -> LLM:
        """Load the model. Replies use the first named adapter.

        Args:
            progress: Show progress bars.
            **more: Other arguments of `paceline.load`.
        """
        import_torch()
        import paceline.llm

        set_threads(self.threads)
        names = ("dtype", "device", "device_map", "kv_type", "revision", "token", "allow_pickle")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given |= {"progress": progress and not follows(), "tensor_parallel": processes() > 1}
        merged, named = parse_adapters(self.adapter or ())
        llm = paceline.llm.load(self.model, adapter=merged, adapters=named, **given, **more)
        llm.adapter = next(iter(named), None)
        return llm


@dataclass(frozen=True, slots=True)
class LoadFlags(ModelOptions):
    """The model, the devices to run it on, and its drafter."""

    quantize: Quantize = "auto"
    chat_template: ChatTemplate = None
    mmproj: VisionFile = None
    drafter: str = _speculation(
        "auto (suffix), found, none, ngram, suffix, eagle3, medusa or KIND:REF. Never changes the text.\n\n"
        "A drafter guesses the next tokens, and the model checks all guesses in one pass. found looks for a head "
        "trained for the model (next to it or in the hub's cache), then for the smallest model on this machine with "
        "the same vocabulary, and otherwise uses suffix. In `paceline serve`, auto means found. "
        "KIND:REF is model:REF (a small model with any tokenizer; REF@ADAPTER merges a LoRA adapter), "
        "a head trained for the model (eagle3:REF, medusa:REF, block:REF, early-exit:REF, or head:REF for any of "
        "them) or early-exit:LAYERS (early-exit:8@0.7 ends a chain below a probability of 0.7). eagle3 and medusa "
        "without REF are the heads included in Paceline. Combine drafters with '+': the first one that has a proposal "
        "drafts. With the default --rule match, the text stays the same.",
        "-d",
        metavar="DRAFTER",
        default="auto",
    )
    draft: str = _speculation(
        "Tokens drafted per round: auto, a number, or a tree such as 16x4x2.\n\nA tree is written "
        "NODESxDEPTHxBRANCH. auto chooses the fastest size on this machine, which may be no draft at all.",
        metavar="SIZE",
        default="auto",
    )
    draft_quantize: DraftQuantize = "auto"
    draft_device_map: str | None = _speculation(
        "Like --device-map, for a draft model. cpu keeps the whole draft model on the CPU.", metavar="MAP", default=None
    )
    draft_revision: str | None = _speculation(
        "Branch, tag or commit of the drafter's hub id.", metavar="NAME", default=None
    )
    draft_vocab: DraftVocab = "auto"

    def load(self, *, progress: bool, drafter: str | list[str] | None = None, **more: Any) -> LLM:
        """Load the model with its drafter, or with `drafter` if given. `more`: Other arguments of `paceline.load`."""
        return self.open(
            progress=progress,
            drafter=self.drafter if drafter is None else drafter,
            draft=parse_draft(self.draft),
            quantize=self.quantize,
            draft_quantize=self.draft_quantize,
            draft_device_map=self.draft_device_map,
            draft_revision=self.draft_revision,
            draft_vocab=parse_draft_vocab(self.draft_vocab),
            chat_template=self.chat_template,
            mmproj=self.mmproj,
            **more,
        )


def parse_draft_vocab(text: str) -> int | str:
    """Parse the value of --draft-vocab. Raise `InvalidOption` if it is not valid."""
    from paceline.drafters.trimmed import check_draft_vocab

    wanted = int(text) if text.isdecimal() else text
    check_draft_vocab(wanted)
    return wanted


def parse_draft(text: str) -> DraftBudget | Literal["auto"]:
    """Parse the value of --draft. Raise `InvalidOption` if it is not valid."""
    from paceline.drafters.factory import parse_budget

    size: DraftBudget | Literal["auto"] | None = "auto" if text == "auto" else parse_budget(text)
    if size is None:
        raise InvalidOption(
            f"--draft must be auto, a number or NODESxDEPTHxBRANCH, got {text!r}", "Write 5 or 16x4x2, for example"
        )
    return size


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_numbers(name: str, text: str, number: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Parse numbers of option `name` that are separated by commas. Raise `InvalidOption` if one is not a number."""
    try:
        return tuple(number(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if number is int else "numbers"
        raise InvalidOption(f"{name} must be {what} separated by commas, got {text!r}", f"Write {example}") from None


def parse_bias(text: str) -> tuple[int, float]:
    """Parse one --logit-bias to (token id, bias). Raise `InvalidOption` if it is not valid."""
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise InvalidOption(f"--logit-bias must be ID=NUMBER, got {text!r}", "Write 42=-1.5, for example") from None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options for choosing tokens and ending a reply. None means that an option was not given."""

    max_new_tokens: int | None = _length(
        "Maximum length of a reply, in tokens.", "--max-new-tokens", "--max-tokens", "-n", show_default="512"
    )
    min_new_tokens: int | None = _length(
        "Minimum length of a reply, in tokens. Until then, end-of-sequence and stop tokens are banned."
    )
    stop: list[str] | None = _length("End the reply before this text. Repeatable.")
    stop_token_id: list[int] | None = _length("End the reply at this token id. Repeatable.", metavar="ID")
    thinking_budget: int | None = _length(
        "Maximum length of the model's reasoning, in tokens. Then the end of the reasoning is forced."
    )
    ignore_eos: bool = _length("Continue past the model's end-of-sequence tokens.", default=False)
    temperature: float | None = _sampling(
        "Randomness; 0 is greedy.\n\nSampling options that are not given are taken from the model's generation_config.",
        "-t",
        show_default="from the model, else 0",
    )
    top_k: int | None = _sampling("Sample from the N most likely tokens. 0: from all.")
    top_p: float | None = _sampling("Sample from the most likely tokens with a total probability of X. 1: from all.")
    min_p: float | None = _sampling("Drop tokens that are less than X times as likely as the most likely one.")
    typical_p: float | None = _sampling(
        "Sample from the most typical tokens with a total probability of X. 1: from all."
    )
    top_n_sigma: float | None = _sampling(
        "Drop tokens with a logit more than X standard deviations below the highest. 0: off."
    )
    xtc_probability: float | None = _sampling(
        "Probability, at each token, of dropping all likely tokens except the least likely of them. 0: off."
    )
    xtc_threshold: float | None = _sampling("Minimum probability of a likely token for XTC.", show_default="0.1")
    seed: int | None = _sampling("Random seed. The same seed gives the same text.", "-s", show_default="random")
    repetition_penalty: float | None = _penalty("Values above 1 make tokens of the prompt and the reply less likely.")
    frequency_penalty: float | None = _penalty(
        "Subtract X from a token's logit for each occurrence in the reply (-2 to 2)."
    )
    presence_penalty: float | None = _penalty("Subtract X from a token's logit if it occurs in the reply (-2 to 2).")
    dry_multiplier: float | None = _penalty(
        "DRY: subtract X from the logit of a token that would extend a repetition, more if it is long. 0: off."
    )
    dry_base: float | None = _penalty(
        "Factor of DRY's penalty for each additional repeated token.", show_default="1.75"
    )
    dry_allowed_length: int | None = _penalty("Longest repetition without a DRY penalty, in tokens.", show_default="2")
    dry_penalty_last_n: int | None = _penalty(
        "Number of most recent tokens in which DRY looks for repetitions. -1: all.", show_default="-1"
    )
    dry_sequence_breaker: list[str] | None = _penalty(
        "Text that ends a repetition for DRY. Repeatable.", show_default='line break, :, ", *'
    )
    logit_bias: list[str] | None = _penalty(
        "Add a number to the logit of a token id; -inf bans the token. Repeatable.", metavar="ID=NUMBER"
    )
    bad_word: list[str] | None = _penalty("Never write this text. Repeatable.")
    no_repeat_ngram_size: int | None = _penalty("Never repeat N consecutive tokens of the prompt or the reply. 0: off.")
    rule: str | None = _speculation(
        "Acceptance rule: match, rejection, block or typical.\n\nWith match, the text does not depend on the drafter. "
        "With rejection and block, the distribution of the text does not depend on it. typical is lossy.",
        metavar="RULE",
        show_default="match",
    )
    json_schema: str | None = _structure(
        "Reply with JSON that follows this schema: a file, or the schema itself.", metavar="SCHEMA"
    )
    regex: str | None = _structure("Reply with text that matches this regular expression.", metavar="REGEX")
    grammar: str | None = _structure(
        "Reply with text that follows this grammar: a file, or the grammar itself, in llguidance's dialect of Lark.",
        metavar="GRAMMAR",
    )

    def given(self) -> dict[str, Any]:
        """Return the given options under the names of `Sampling`. Raise `InvalidOption` if one is not valid."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None and value != []}
        for name in ("stop_token_id", "bad_word", "dry_sequence_breaker"):
            if name in given:
                given[f"{name}s"] = given.pop(name)
        if "logit_bias" in given:
            given["logit_bias"] = dict(map(parse_bias, given["logit_bias"]))
        if grammar := {name: given.pop(name) for name in ("json_schema", "regex", "grammar") if name in given}:
            given["grammar"] = parse_grammar(**grammar)
        return given

    def check(self, **defaults: Any) -> None:
        """Raise `InvalidOption` for values that are not valid for any model."""
        import_torch()
        from paceline.sampling.parameters import Sampling

        given = self.given()
        if "thinking_budget" in given and "grammar" in given:
            raise InvalidOption(
                "--thinking-budget does not work with a grammar, which leaves no room for reasoning", "Drop one of them"
            )
        reasoning = ("", "</think>") if "thinking_budget" in given else ()
        Sampling(**(defaults | given), reasoning=reasoning)

    def resolve(self, llm: LLM, **defaults: Any) -> Sampling:
        """Return the parameters for this model: given options, then `defaults`, then the model's recommendations."""
        given = self.given()
        if "thinking_budget" in given:
            given["thinking_budget"] = _thinking_budget(llm, given["thinking_budget"])
        sampling = llm.sampling(**(defaults | given))
        if sampling.temperature > 0:
            note(f"sampling: {sampling_line(sampling, given)} (-t 0 writes greedy text)")
        elif ignored := ignored_line(given):
            note(ignored)
        return sampling


def _thinking_budget(llm: LLM, tokens: int) -> ThinkingBudget:
    """Return a budget with the model's markers around reasoning. Raise `InvalidOption` if it does not reason."""
    from paceline.chat.thinking import thought_format_of

    form = thought_format_of(llm.tokenizer.chat_template)
    if form is None:
        raise InvalidOption(
            "the model's chat template has no reasoning to limit with --thinking-budget", "Leave it out"
        )
    return form.budget(tokens, inside=False)


def parse_grammar(**options: str) -> Grammar:
    """Return the grammar of `json_schema`, `regex` or `grammar`. Raise `InvalidOption` if it is not valid."""
    from paceline.sampling.grammar import Grammar

    if len(options) != 1:
        raise InvalidOption("a reply can follow only one grammar", "Use one of --json-schema, --regex and --grammar")
    ((name, text),) = options.items()
    if name == "regex":
        return Grammar.regex(text)
    is_schema = name == "json_schema"
    option_name, kind, mark = ("--json-schema", "JSON schema", "{") if is_schema else ("--grammar", "grammar", ":")
    try:
        if os.path.isfile(text):  # False if the text is not a valid path
            text = Path(text).read_text(encoding="utf-8")
        elif mark not in text:
            raise InvalidOption(f"{option_name} {text!r} is neither a file nor a {kind}", "Pass one of them")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{option_name} {text!r} cannot be read: {error}", "Pass a UTF-8 file, or the text itself"
        ) from error
    return Grammar.json_schema(text) if is_schema else Grammar.lark(text)
