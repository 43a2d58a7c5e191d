"""`paceline record`, `replay` and `tune`: recording replies, and predicting the speed of drafters over them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.commands import option, options_of
from paceline.cli.options import (
    DEMO,
    AsJson,
    DraftQuantize,
    DraftVocab,
    LoadFlags,
    ModelOptions,
    Quantize,
    Quiet,
    SamplingOptions,
    note,
    parse_draft_vocab,
    parse_names,
    progress_wanted,
)
from paceline.cli.prompts import read_rows
from paceline.cli.show import print_figures
from paceline.cli.wrapping import say
from paceline.cli.writing import ReplyWriter, write_batch
from paceline.errors import InvalidData, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.replay.predict import CandidatePrediction, Predictor
    from paceline.llm import LLM
    from paceline.recording.rows import RecordedReply
    from paceline.recording.states import StateFiles

_replay = options_of("Replay")
RecordingFile = Annotated[Path, typer.Argument(metavar="FILE", help="Recording.", show_default=False)]


def record(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Recording to write, or to append to.", show_default=False)
    ],
    *,
    prompts: Annotated[
        Path, option("JSONL file of prompts, as for generate; - is stdin.", metavar="FILE", panel="Input and output")
    ],
    load: LoadFlags,
    sampling: SamplingOptions,
    raw: Annotated[
        bool, option("Pass the text to the model unchanged, without the chat template.", panel="Input and output")
    ] = False,
    samples: Annotated[
        int, option("Number of replies per prompt; they share its prefill.", min=1, panel="Input and output")
    ] = 1,
    batch: Annotated[int, option("Number of prompts to answer at once.", min=1, panel="Input and output")] = 1,
    states: Annotated[
        float,
        option(
            "Maximum size of hidden states to store in FILE.states, in GiB. 0: none.\n\nreplay and tune then read the "
            "states that heads need (an early, a middle, a late layer and the last) instead of computing them. "
            "Replies are written without drafts.",
            min=0,
            metavar="GIB",
            panel="Input and output",
        ),
    ] = 0.0,
    quiet: Quiet = False,
) -> None:
    """Answer prompts, and record the replies for replay and tune.

    A recording contains the token ids of prompts and replies, seeds and sampling parameters. generate and serve can
    also record their replies with --record.
    """
    from paceline.llm import LLM
    from paceline.recording.states import StateKeeper, states_folder
    from paceline.types import DraftBudget

    sampling.check()
    rows = read_rows(prompts)
    if states and load.drafter not in ("auto", "none"):
        raise InvalidOption("--states does not work with --drafter", "Leave out --drafter")
    if not states < 1 << 20:
        raise InvalidOption(f"--states must be a number of GiB, got {states:g}", "Use 4, for example")
    llm = load.load(progress=progress_wanted(quiet), drafter="none" if states else None)
    files = _state_files(llm, file, states) if states else None
    if files:
        llm = LLM(llm.model, StateKeeper(files), DraftBudget.chain(0))
    with recording(llm, file), open(os.devnull, "w", encoding="utf-8") as nowhere:
        writer = ReplyWriter(llm, sampling.resolve(llm), raw, True, nowhere)
        failed = write_batch(writer, rows, samples, max(batch, samples), quiet)
    assert llm.recorder
    left_out = f", {llm.recorder.skipped} left out" if llm.recorder.skipped else ""
    note(f"{llm.recorder.count} replies recorded in {file}{left_out}: `paceline tune {shlex.quote(str(file))}`")
    if files:
        lacking = f", states of {files.refused} texts did not fit" if files.refused else ""
        note(f"hidden states of {files.count} texts stored in {states_folder(file)}{lacking}")
    if failed:
        raise typer.Exit(1)


def _state_files(llm: LLM, file: Path, gib: float) -> StateFiles:
    """Return the storage for hidden states next to the recording. Raise `UnsupportedModel` if there are no states."""
    from paceline.recording.states import StateFiles, states_folder
    from paceline.train.eagle3 import default_taps
    from paceline.train.kinds import native_decoder

    return StateFiles(states_folder(file), default_taps(native_decoder(llm).config.layers), int(gib * 2**30))


@contextlib.contextmanager
def recording(llm: LLM, path: Path | None) -> Iterator[None]:
    """Record the replies that begin in this block, if there is a path.

    Raises:
        InvalidData: If the file is not a recording of this model.
        CannotWrite: If recording stopped.
    """
    if path is None:
        yield
        return
    with llm.record(path) as recorder:
        yield
    recorder.check()


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Replies to replay, and drafters to replay them with."""

    drafters: str | None = _replay(
        "Drafters, separated by commas.\n\nFor replay, append @LENGTH or @NODESxDEPTHxBRANCH to set a draft size, as "
        "for bench. tune tries all sizes, and combines lookups with other drafters.",
        metavar="DRAFTERS",
        show_default="all that need no files",
    )
    count: int = _replay("Maximum number of replies to replay, spread evenly.", min=1, default=200)
    batch: int = _replay("Number of replies to replay at once, as if they shared passes.", min=1, default=1)
    prefix_memory: float = _replay("Memory for the prefix cache, in GiB, as for serve. 0: off.", min=0, default=0.0)

    def open(
        self, file: Path, model: ModelOptions, quantize: str, draft_quantize: str, draft_vocab: str, progress: bool
    ) -> tuple[Predictor, list[RecordedReply]]:
        """Read the recording, load its model and measure the costs of its rounds."""
        from paceline.bench.replay.predict import Predictor, check_model, measure_prices
        from paceline.recording.file import Recording
        from paceline.recording.states import states_folder

        vocab, recorded = parse_draft_vocab(draft_vocab), Recording(file)
        if not recorded:
            raise InvalidData(f"{file} contains no replies", "Record some with paceline record")
        replies = recorded[:: max(1, -(-len(recorded) // self.count))]
        if model.model == DEMO:
            model = model.with_model(recorded.header.model)
        llm = model.open(progress=progress, drafter=None, quantize=quantize)
        check_model(recorded.header, llm.model)
        prices = measure_prices(llm.model, replies[0], self.batch)
        as_recorded = (model.dtype, model.kv_type) == ("auto", "auto")  # otherwise the states differ
        same = recorded.header.quantize == llm.model.quantize and as_recorded
        predictor = Predictor(
            llm.model,
            prices,
            draft_quantize=draft_quantize,  # type: ignore[arg-type]
            draft_vocab=vocab,
            width=self.batch,
            prefix_bytes=int(self.prefix_memory * 2**30),
            states=states_folder(file) if same else None,
        )
        return predictor, replies


def replay(
    file: RecordingFile,
    *,
    options: ReplayOptions,
    model: ModelOptions,
    quantize: Quantize = "auto",
    draft_quantize: DraftQuantize = "auto",
    draft_vocab: DraftVocab = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict the speed of drafters from recorded replies.

    Only the drafters run, not the model. Tokens per round are exact for drafters with a draft size. Speeds are
    predicted from the time that passes take on this machine.
    """
    from paceline.bench.replay.predict import Candidate
    from paceline.bench.replay.search import parts_of
    from paceline.bench.systems import split_budget
    from paceline.drafters.factory import check_spec

    named = [Candidate(*split_budget(name)) for name in parse_names(options.drafters or "")]
    for candidate in named:
        check_spec(candidate.drafter)
    with _status("timing passes", quiet) as say:
        predictor, replies = options.open(file, model, quantize, draft_quantize, draft_vocab, progress_wanted(quiet))
        found = []
        for candidate in named or [Candidate(part) for part in parts_of(predictor.model)]:
            say(f"replaying {candidate.name}")
            found.append(predictor.predict(candidate, replies))
    _show(file, predictor, replies, found, as_json)


def tune(
    file: RecordingFile,
    *,
    options: ReplayOptions,
    model: ModelOptions,
    quantize: Quantize = "auto",
    draft_quantize: DraftQuantize = "auto",
    draft_vocab: DraftVocab = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find the fastest drafter and draft size for recorded replies.

    Drafters are tried in many sizes, first separately, then combined. Only drafters whose interval stays above 1.0 are
    recommended.
    """
    from paceline.bench.replay.search import parts_of, recommended, search
    from paceline.bench.systems import split_budget
    from paceline.drafters.factory import check_spec
    from paceline.files.stores import name_of

    named = parse_names(options.drafters or "")
    if any(part in ("none", "auto") or split_budget(part)[1] for part in named):
        raise InvalidOption("tune needs names of drafters without sizes", "Write suffix,eagle3, for example")
    for part in named:
        check_spec(part)
    with _status("timing passes", quiet) as say:
        predictor, replies = options.open(file, model, quantize, draft_quantize, draft_vocab, progress_wanted(quiet))
        found = search(predictor, replies, named or parts_of(predictor.model), lambda name: say(f"replaying {name}"))
    best = recommended(found)
    given = shlex.join(_given(model, quantize=quantize, draft_quantize=draft_quantize, draft_vocab=draft_vocab))
    name = model.model if model.model != DEMO else name_of(predictor.model.path)
    line = f"paceline generate -m {shlex.quote(name)} {given}".rstrip()
    line += f" {best.candidate.options if best else '--drafter none'}"
    gain = "no drafter is certain to be faster than plain decoding"
    if best:
        gain = f"predicted: {_interval(best.speedup)} times as fast as plain decoding"
    _show(file, predictor, replies, found, as_json, fastest={"command": line, "predicted": gain})


def _given(model: ModelOptions, **more: str) -> list[str]:
    """Return the options of the measured model as command-line arguments, without defaults, model and token."""
    kept = [field for field in fields(model) if field.name not in ("model", "token")]
    values = {field.name: getattr(model, field.name) for field in kept if getattr(model, field.name) != field.default}
    values |= {name: value for name, value in more.items() if value != "auto"}
    words = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [option] if one is True else [option, str(one)]
    return words


@contextlib.contextmanager
def _status(text: str, quiet: bool) -> Iterator[Any]:
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        if not progress_wanted(quiet):
            status.stop()
        yield status.update


def _show(
    file: Path,
    predictor: Predictor,
    replies: Sequence[RecordedReply],
    found: Sequence[CandidatePrediction],
    as_json: bool,
    fastest: Mapping[str, str] | None = None,
) -> None:
    """Print predictions, as a table or as JSON."""
    rows = [prediction.as_dict() for prediction in found]
    costs = predictor.costs
    if as_json:
        about: dict[str, Any] = {"recording": str(file), "model": str(predictor.model.path), "replies": len(replies)}
        about["tokens"] = sum(len(reply.reply) for reply in replies)
        about["pass_ms"] = {n: 1e3 * seconds for n, seconds in costs.passes.items()}
        about |= {"prefill_tokens_per_second": 1 / costs.prefill, "host_ms": 1e3 * costs.host}
        typer.echo(json.dumps(about | {"drafters": rows} | ({"fastest": fastest} if fastest else {})))
        return
    tokens = sum(len(reply.reply) for reply in replies)
    title = f"{len(replies)} replies, {tokens} tokens; plain decoding {rows[0]['plain_tokens_per_second']:.1f} tok/s"
    print_figures(list(_COLUMNS), [[cell(row) for cell in _COLUMNS.values()] for row in rows], title=title, least=3)
    took, saved = (sum(row[key] for row in rows) for key in ("replay_seconds", "predicted_seconds"))
    ratio = f"{saved / max(took, 1e-9):.0f} times"
    say(f"The replay took {took:.1f} s. Generating would take {saved:.0f} s ({ratio} as long).", err=False)
    if fastest:
        typer.echo(f"fastest: {fastest['command']}\n{fastest['predicted']}")  # a command is copied as one line


_COLUMNS: Mapping[str, Any] = {
    "drafter": lambda row: row["drafter"],
    "draft": lambda row: row["draft"],
    "x plain [95 %]": lambda row: _interval(row["ratio"]),
    "tok/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "tokens/round": lambda row: f"{row['tokens_per_round']:.2f}" + ("" if row["exact"] else " ~"),
    "decoding only": lambda row: f"{row['decode_ratio']:.2f}",
    "draft, ms": lambda row: f"{row['milliseconds']['draft']:.2f}",
    "drafted": lambda row: f"{row['drafted_per_round']:.1f}",
    "accepted to depth 1, 2, ...": lambda row: " ".join(f"{share:.2f}" for share in row["accepted_at"][:6]),
}
"""Heading -> cell of a prediction. "~" marks predicted values, if the controller chose sizes."""


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
