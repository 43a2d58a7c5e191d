"""Systems under test: Paceline with a drafter, or another program. The name of a system identifies it completely."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from paceline.bench.measure import Answer, FirstTokenTimer, MeasuredReply
from paceline.bench.peer_process import PeerProcess
from paceline.bench.peers import PEERS, PeerPrompt, peer_drafters
from paceline.bench.questions import Question
from paceline.drafters.factory import AUTO, check_spec, open_drafter, parse_budget
from paceline.drafters.trimmed import DraftVocab
from paceline.engine.draft_policy import shown_name
from paceline.errors import InvalidOption
from paceline.kernels.quantize import Precision, check_precision
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import RuleName
from paceline.types import DraftBudget

OURS = "paceline"


@dataclass(frozen=True, slots=True)
class System:
    """A system under test.

    Attributes:
        program: "paceline" or a peer.
        drafter: DRAFTER or DRAFTER@SIZE, or a drafter of the peer, or "" for none.
        precision: See `split_precision`. "" means weights as loaded.
        temperature: 0 is greedy.
        width: Number of requests in a batch.
    """

    program: str = OURS
    drafter: str = ""
    precision: str = ""
    temperature: float = 0.0
    width: int = 1

    @property
    def name(self) -> str:
        program, drafter = ("", self.drafter or "plain") if self.program == OURS else (self.program, self.drafter)
        temperature = f"T={self.temperature:g}" if self.temperature else ""
        width = f"batch {self.width}" if self.width > 1 else ""
        return " ".join(part for part in (program, drafter, self.precision, temperature, width) if part)

    @property
    def base(self) -> System:
        """The same system without drafts."""
        return replace(self, drafter="")

    @property
    def single(self) -> System:
        """The base with one request at a time."""
        return replace(self, drafter="", width=1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems to compare: plain decoding and every drafter, at every precision, temperature and batch width.

    Attributes:
        drafters: Drafters as in `paceline.load`. DRAFTER@LENGTH or DRAFTER@NODESxDEPTHxBRANCH fixes the draft size;
            otherwise the draft policy chooses it.
        against: Names in `PEERS`. Each program is measured without drafts and with its own drafters.
        temperatures: Sampling temperatures.
        rule: Acceptance rule of Paceline's systems.
        tokens: Maximum length of a reply in tokens.
        repeats: Number of times that each question is asked.
        seed: Seed of sampling.
        threads: CPU threads of the other programs.
        widths: Numbers of requests in a batch.
        draft_vocab: See `open_drafter`.

    Raises:
        InvalidOption: If a value is not valid.
    """

    drafters: Sequence[str] = (AUTO,)
    against: Sequence[str] = ()
    temperatures: Sequence[float] = (0.0,)
    rule: RuleName = "match"
    tokens: int = 96
    repeats: int = 1
    seed: int = 0
    threads: int = 1
    widths: Sequence[int] = (1,)
    draft_vocab: DraftVocab = "auto"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.against if name not in PEERS]:
            raise InvalidOption(f"{unknown[0]!r} is not a known program", f"Choose from {', '.join(PEERS)}")
        if min(self.widths) < 1:
            raise InvalidOption(
                f"a batch must have 1 request or more, got {min(self.widths)}", "Use numbers such as 1,8"
            )
        if self.against and max(self.widths) > 1:
            raise InvalidOption("other programs answer one request at a time", "Leave out --batch or --against")
        for drafter in self.drafters:
            check_spec(split_budget(drafter)[0])
        for temperature in (1.0, *self.temperatures):  # 1.0 checks the rule
            self.sampling(temperature)

    @property
    def draft_model(self) -> str:
        """Path of the first GGUF draft model among the drafters, for programs that support draft models, or ""."""
        models = (split_budget(name)[0].removeprefix("model:") for name in self.drafters if name.startswith("model:"))
        return next((model for model in models if model.endswith(".gguf")), "")

    def sampling(self, temperature: float) -> Sampling:
        """Return the sampling parameters of Paceline's systems. Rules differ only at temperatures above 0."""
        rule: RuleName = self.rule if temperature else "match"
        return Sampling(max_new_tokens=self.tokens, temperature=temperature, seed=self.seed, rule=rule)


def split_budget(drafter: str) -> tuple[str, DraftBudget | None]:
    """Split DRAFTER@SIZE into drafter and size. The size may be missing (None): other text after "@" is an adapter."""
    spec, _, text = drafter.rpartition("@")
    budget = parse_budget(text) if spec else None
    return (drafter, None) if budget is None else (spec, budget)


def split_precision(precision: str) -> tuple[Precision, Precision]:
    """Split TARGET or TARGET+DRAFTER into two precisions. An empty one is "auto".

    Raises:
        InvalidOption: If a precision is unknown.
    """
    names = [name or "auto" for name in precision.partition("+")[::2]]
    for name in names:
        check_precision(name)
    target, drafter = cast("list[Precision]", names)
    return target, drafter


def own_systems(targets: Mapping[str, LLM], comparison: Comparison) -> dict[System, Answer]:
    """Create Paceline's systems. Drafters share the target's weights; temperatures and widths share a drafter.

    Args:
        targets: Precision -> model.
        comparison: Systems to create.

    Raises:
        PacelineError: If a drafter cannot be opened.
    """
    found: dict[System, Answer] = {}
    names = dict.fromkeys(("none", *comparison.drafters))
    short = len({shown_name(name) for name in names}) == len(
        names
    )  # false if two folders contain drafters with the same name
    for precision, llm in targets.items():
        for name in names:
            spec, budget = split_budget(name)
            quantize, vocab = split_precision(precision)[1], comparison.draft_vocab
            drafting = LLM(llm.model, open_drafter(spec, llm.model, quantize, draft_vocab=vocab), budget)
            drafter = "" if spec == "none" else shown_name(name) if short else name
            for temperature in comparison.temperatures:
                for width in comparison.widths:
                    system = System(OURS, drafter, precision, temperature, width)
                    found[system] = own_system(drafting, comparison.sampling(temperature), width)
    return found


def own_system(llm: LLM, sampling: Sampling, width: int = 1) -> Answer:
    """Return a system that answers a single prompt as a stream, and several prompts as a batch of `width`."""

    def answer(question: Question) -> MeasuredReply:
        timer = FirstTokenTimer()
        if question.more:
            with llm.batch(question.prompts, sampling, width=width) as batch:
                for _ in batch:
                    timer.mark()
            done = batch.completions
        else:
            with llm.stream(question.prompts[0], sampling) as stream:
                for _ in stream:
                    timer.mark()
            done = [stream.completion]
        return MeasuredReply([t for c in done for t in c.token_ids], timer.seconds, tuple(c.stats for c in done))

    return answer


def peer_systems(name: str, process: PeerProcess, llm: LLM, comparison: Comparison) -> dict[System, Answer]:
    """Return a peer's systems, without drafts and with its drafters. `llm` renders the prompts for all programs."""

    def system(temperature: float, drafter: str) -> Answer:
        def answer(question: Question) -> MeasuredReply:
            began = time.perf_counter()
            prompt = PeerPrompt(render(llm, question.text), temperature, drafter, comparison.seed)
            rendering = time.perf_counter() - began
            reply = process.ask(prompt)
            return replace(reply, first=rendering + reply.first)

        return answer

    return {
        System(name, drafter, temperature=temperature): system(temperature, drafter)
        for temperature in comparison.temperatures
        for drafter in ("", *peer_drafters(name, comparison.draft_model))
    }


def render(llm: LLM, text: str) -> str:
    """Render a question as a user's message with the model's chat template."""
    if llm.tokenizer.chat_template is None:
        return text
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
