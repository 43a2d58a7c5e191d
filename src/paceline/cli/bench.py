"""`paceline bench`: speed on this machine and on your prompts, compared with other programs."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.commands import options_of
from paceline.cli.images import read_images
from paceline.cli.options import (
    DEMO,
    DataType,
    Device,
    DraftVocab,
    ModelName,
    Quiet,
    Threads,
    parse_draft_vocab,
    parse_names,
    parse_numbers,
    progress_wanted,
    set_threads,
)
from paceline.cli.show import print_figures
from paceline.cli.wrapping import say
from paceline.errors import CannotWrite, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.bench.systems import Comparison
    from paceline.llm import LLM
    from paceline.vision.picture import Picture


_systems = options_of("Systems")
_workload = options_of("Workload")
_output = options_of("Output")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Systems to compare, their workload, and output files."""

    prompts: Path = _workload(
        'JSONL file of {"category", "prompt"}, or of Spec-Bench questions.', metavar="FILE", default=MISSING
    )
    count: int = _workload("Number of prompts to measure, spread evenly over the categories.", min=1, default=13)
    context: int | None = _workload("Lengthen every prompt to N tokens by putting other prompts before it.", min=1)
    image: list[str] | None = _workload(
        "Image to put before every prompt; - is stdin. Repeatable.\n\nPNG, JPEG, WebP, GIF or BMP. The model must "
        "support images. Encoding is not timed, because it happens during the warm-up.",
        metavar="FILE",
    )
    tokens: int = _workload("Maximum length of a reply, in tokens.", min=1, default=96)
    repeats: int = _workload("Number of times to measure every prompt.", min=1, default=1)
    batch: str = _workload("Batch widths to measure, separated by commas, such as 1,8.", metavar="N,N", default="1")
    temperature: str = _workload("Temperatures, separated by commas. 0 is greedy.", metavar="X,X", default="0")
    seed: int = _workload("Seed of sampled replies.", default=0)
    drafters: str = _systems(
        "Drafters, separated by commas. Plain decoding is always measured.\n\nAppend @LENGTH or @NODESxDEPTHxBRANCH to "
        "a drafter to set its draft size, such as eagle3@24x6x4.",
        metavar="DRAFTERS",
        default="suffix",
    )
    rule: str = _systems(
        "Acceptance rule above temperature 0: match, rejection, block or typical.", metavar="RULE", default="match"
    )
    quantize: str = _systems(
        "Precisions to measure, separated by commas: auto, none, int8, int4 (as for generate).\n\nAppend +int8 or "
        "+int4 to quantise the drafters too, such as int4+int8.",
        metavar="MODES",
        default="auto",
    )
    draft_vocab: DraftVocab = "auto"
    against: str = _systems(
        "Other programs, if installed: transformers, llama.cpp, llama-server, openvino.", metavar="PROGRAMS", default=""
    )
    model: ModelName = DEMO
    dtype: DataType = "auto"
    device: Device = "auto"
    threads: Threads = None
    out: Path | None = _output("Write all results to this file, as JSON.", "-o", metavar="FILE")
    report: list[Path] | None = _output("Write tables (.md) or a page with plots (.html). Repeatable.", metavar="FILE")

    def comparison(self) -> Comparison:
        """Return the systems to compare. Raise `InvalidOption` if an option is not valid."""
        import torch

        from paceline.bench.systems import Comparison

        set_threads(self.threads)
        temperatures = dict.fromkeys(parse_numbers("--temperature", self.temperature, float, "0,0.7"))
        widths = dict.fromkeys(parse_numbers("--batch", self.batch, int, "1,8"))
        return Comparison(
            parse_names(self.drafters),
            parse_names(self.against),
            tuple(temperatures),
            self.rule,  # type: ignore[arg-type]  # Sampling checks it
            self.tokens,
            self.repeats,
            self.seed,
            torch.get_num_threads(),
            tuple(widths),
            parse_draft_vocab(self.draft_vocab),
        )

    def precisions(self) -> dict[str, Any]:
        """Return precision ("" for auto) -> value of --quantize for the target. Raise `InvalidOption` if one is
        unknown."""
        from paceline.bench.systems import split_precision

        names = ["" if name == "auto" else name for name in parse_names(self.quantize)] or [""]
        return {name: split_precision(name)[0] for name in names}

    def load(self, *, progress: bool) -> dict[str, LLM]:
        """Load the model at each precision. Precisions with the same weights share them."""
        import paceline.llm

        # Without a prefix cache, every prompt is read from its beginning.
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "prefix_memory": 0, "progress": progress}
        modes = self.precisions()
        loaded = {
            mode: paceline.llm.load(self.model, drafter=None, quantize=mode, **where) for mode in set(modes.values())
        }
        return {name: loaded[mode] for name, mode in modes.items()}

    def images(self) -> tuple[Picture, ...]:
        """Read the images. Raise `PacelineError` if one cannot be read, or if other programs are to be measured."""
        if self.image and self.against:
            raise InvalidOption("other programs are only measured without images", "Leave out --image or --against")
        return tuple(read_images(self.image))

    def check_outputs(self) -> None:
        """Raise `PacelineError` if results cannot be written, before hours are spent on measuring."""
        from paceline.bench.plots import require_matplotlib

        reports = self.report or []
        for path in [*([self.out] if self.out else []), *reports]:
            if not path.absolute().parent.is_dir():
                raise InvalidOption(f"{path.absolute().parent} is not a folder", "Use a file in an existing folder")
        for path in reports:
            if path.suffix == ".html":
                require_matplotlib()
            if path.suffix not in (".md", ".html"):
                raise InvalidOption(f"--report must end in .md or .html, got {path}", "Use report.html, for example")


def bench(*, options: BenchOptions, quiet: Quiet = False) -> None:
    """Compare drafters and other programs on your prompts.

    The systems take turns on every prompt. The time runs from the text of the prompt to the text of the reply.
    """
    comparison = options.comparison()
    options.precisions()
    options.check_outputs()
    images = options.images()
    from rich.console import Console
    from rich.progress import Progress

    from paceline.bench.questions import lengthen, pick, read_questions
    from paceline.bench.run import run

    everything = read_questions(options.prompts)
    targets = options.load(progress=progress_wanted(quiet))
    if images:
        next(iter(targets.values())).required_vision()
    questions = [replace(question, images=images) for question in pick(everything, options.count)]
    if options.context is not None:
        tokenizer = next(iter(targets.values())).tokenizer
        questions = [lengthen(question, everything, options.context, tokenizer) for question in questions]
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("getting ready", total=None)
        result = run(
            targets,
            comparison,
            questions,
            lambda sample, total: bar.update(task, total=total, advance=1, description=sample.question.category),
            prompts=str(options.prompts),
            context=options.context,
            images=[
                {"file": name, "pixels": [*image.pixels.shape[1::-1]], "sha256": image.digest}
                for name, image in zip(options.image or (), images, strict=True)
            ],
        )
    _show(result)
    if options.out is not None:
        _write(options.out, json.dumps(result, indent=1) + "\n")
    for path in options.report or []:
        _write(path, _report(path, result))


def _show(result: Mapping[str, Any]) -> None:
    from paceline.bench.tables import main_grids

    for grid in main_grids(result):
        print_figures(grid.columns, grid.rows, title=grid.title)
    for line in result["findings"]:
        say(line, err=False)
    for line in result["missing"]:
        say(f"not measured: {line}")


def _report(path: Path, result: Mapping[str, Any]) -> str:
    from paceline.bench.page import page
    from paceline.bench.tables import all_grids, markdown, remarks

    if path.suffix == ".html":
        return page(result)
    return markdown(path.stem, result["provenance"], all_grids(result), remarks(result))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} could not be written ({error})", "Use another file") from error
