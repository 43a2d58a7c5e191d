"""Systems under test: Paceline with a drafter, or another program, each with a name that identifies it fully."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from paceline.bench.measure import Answer, FirstTokenTimer, MeasuredReply
from paceline.bench.peer_process import PeerProcess
from paceline.bench.peers import PEERS, PeerPrompt, peer_drafters
from paceline.bench.questions import Question
from paceline.drafters.factory import AUTO, check_spec, open_drafter, parse_size
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
    """`program`: Paceline or a peer. `drafter`: DRAFTER or DRAFTER@SIZE, a peer's own, "" for none. `precision`:
    see `split_precision`, "" for weights as loaded. `temperature`: 0 is greedy. `width`: requests in a batch."""

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
        """The base answering one request at a time."""
        return replace(self, drafter="", width=1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems to compare: every drafter at every precision, temperature and batch width, beside plain decoding.

    `drafters`: as for `paceline.load`, each with its own draft size as DRAFTER@LENGTH or DRAFTER@NODESxDEPTHxBRANCH;
    without one, Paceline's draft policy decides. `against`: names of `PEERS`, each measured plainly and with its own
    drafters. `repeats`: how often each question is asked. `widths`: numbers of requests answered together.
    `draft_vocab`: see `open_drafter`. Raises `InvalidOption`.
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
            raise InvalidOption(f"{unknown[0]!r} is not a program to compare with", f"Choose from {', '.join(PEERS)}")
        if min(self.widths) < 1:
            raise InvalidOption(
                f"a batch must have 1 request or more, got {min(self.widths)}", "Give numbers such as 1,8"
            )
        if self.against and max(self.widths) > 1:
            raise InvalidOption("other programs answer one request at a time", "Leave out --batch or --against")
        for drafter in self.drafters:
            check_spec(split_size(drafter)[0])
        for temperature in (1.0, *self.temperatures):  # 1.0 checks the rule
            self.sampling(temperature)

    @property
    def draft_model(self) -> str:
        """Path of the first draft model among the drafters that is a GGUF file, for programs that take one; or ""."""
        models = (split_size(name)[0].removeprefix("model:") for name in self.drafters if name.startswith("model:"))
        return next((model for model in models if model.endswith(".gguf")), "")

    def sampling(self, temperature: float) -> Sampling:
        """Return the sampling parameters of Paceline's systems; rules differ only above temperature 0."""
        rule: RuleName = self.rule if temperature else "match"
        return Sampling(max_new_tokens=self.tokens, temperature=temperature, seed=self.seed, rule=rule)


def split_size(drafter: str) -> tuple[str, DraftBudget | None]:
    """Split DRAFTER@SIZE into drafter and size, None without one. Anything else after an "@" is a LoRA adapter."""
    spec, _, text = drafter.rpartition("@")
    size = parse_size(text) if spec else None
    return (drafter, None) if size is None else (spec, size)


def split_precision(precision: str) -> tuple[Precision, Precision]:
    """Split TARGET or TARGET+DRAFTER into the two, each "auto" where it is empty. Raises `InvalidOption`."""
    names = [name or "auto" for name in precision.partition("+")[::2]]
    for name in names:
        check_precision(name)
    target, drafter = cast("list[Precision]", names)
    return target, drafter


def own_systems(targets: Mapping[str, LLM], comparison: Comparison) -> dict[System, Answer]:
    """Return Paceline's systems. Raises `PacelineError`.

    `targets`: the model by precision. All drafters share its weights, all temperatures and widths share a drafter.
    """
    found: dict[System, Answer] = {}
    names = dict.fromkeys(("none", *comparison.drafters))
    short = len({shown_name(name) for name in names}) == len(names)  # or else two folders have files of one name
    for precision, llm in targets.items():
        for name in names:
            spec, size = split_size(name)
            quantize, vocab = split_precision(precision)[1], comparison.draft_vocab
            drafting = LLM(llm.model, open_drafter(spec, llm.model, quantize, draft_vocab=vocab), size)
            drafter = "" if spec == "none" else shown_name(name) if short else name
            for temperature in comparison.temperatures:
                for width in comparison.widths:
                    system = System(OURS, drafter, precision, temperature, width)
                    found[system] = own_system(drafting, comparison.sampling(temperature), width)
    return found


def own_system(llm: LLM, sampling: Sampling, width: int = 1) -> Answer:
    """Return a system that answers with `llm`: one prompt as a stream, several as a batch of `width`."""

    def answer(question: Question) -> MeasuredReply:
        timer = FirstTokenTimer()
        if question.more:
            with llm.batch(question.texts, sampling, width=width) as batch:
                for _ in batch:
                    timer.mark()
            done = batch.completions
        else:
            with llm.stream(question.text, sampling) as stream:
                for _ in stream:
                    timer.mark()
            done = [stream.completion]
        return MeasuredReply([t for c in done for t in c.token_ids], timer.seconds, tuple(c.stats for c in done))

    return answer


def peer_systems(name: str, process: PeerProcess, llm: LLM, comparison: Comparison) -> dict[System, Answer]:
    """Return a peer's systems, plain and with its drafters. `llm` renders the prompts, so that all get the same."""

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
    """Return the question as a user's message in the model's chat template."""
    if llm.tokenizer.chat_template is None:
        return text
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
