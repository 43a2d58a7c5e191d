"""What writes: Paceline with a drafter, or another program; each by a name that says all of it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from paceline.bench.child import Child
from paceline.bench.measure import MeasuredReply, Write
from paceline.bench.peers import PEERS, PeerPrompt
from paceline.drafters.factory import AUTO, check_spec, open_drafter
from paceline.errors import InvalidOption
from paceline.kernels.quantize import Mode, check_mode
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import RuleName
from paceline.types import DraftBudget

OURS = "paceline"


@dataclass(frozen=True, slots=True)
class System:
    """`program`: Paceline or a peer. `drafter`: DRAFTER or DRAFTER@SIZE, of a peer "lookup", "" for none. `precision`:
    as in `split_precision`, "" for weights as they are loaded. `temperature`: 0 is greedy."""

    program: str = OURS
    drafter: str = ""
    precision: str = ""
    temperature: float = 0.0

    @property
    def name(self) -> str:
        program, drafter = ("", self.drafter or "plain") if self.program == OURS else (self.program, self.drafter)
        warm = f"T={self.temperature:g}" if self.temperature else ""
        return " ".join(word for word in (program, drafter, self.precision, warm) if word)

    @property
    def base(self) -> System:
        """The one that writes the same way without drafts."""
        return replace(self, drafter="")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare: every drafter at every precision and temperature, beside plain decoding.

    `drafters`: as for `paceline.load`, each with a size of its own as DRAFTER@LENGTH or DRAFTER@NODESxDEPTHxBRANCH;
    without one, Paceline decides as it goes. `against`: names of `PEERS`, each measured plainly and with its prompt
    lookup. `repeats`: times that every question is asked. Raises `InvalidOption`.
    """

    drafters: Sequence[str] = (AUTO,)
    against: Sequence[str] = ()
    temperatures: Sequence[float] = (0.0,)
    rule: RuleName = "match"
    tokens: int = 96
    repeats: int = 1
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if unknown := [name for name in self.against if name not in PEERS]:
            raise InvalidOption(f"{unknown[0]!r} is no program to compare with", f"There are {', '.join(PEERS)}")
        for drafter in self.drafters:
            check_spec(split_size(drafter)[0])
        for temperature in (1.0, *self.temperatures):  # above 0 for the sake of the rule
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """How Paceline's systems write."""
        # Rules differ only where something is drawn.
        rule: RuleName = self.rule if temperature else "match"
        return Sampling(max_new_tokens=self.tokens, temperature=temperature, seed=self.seed, rule=rule)


def split_size(drafter: str) -> tuple[str, DraftBudget | None]:
    """DRAFTER@SIZE -> (DRAFTER, its size, None if there is none): what else follows an "@" is a LoRA adapter."""
    found = re.fullmatch(r"(.+)@(?:([0-9]{1,9})|([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9}))", drafter)
    if found is None:
        return drafter, None
    length, *tree = found.groups()[1:]
    return found[1], DraftBudget.chain(int(length)) if length else DraftBudget(*map(int, tree))


def split_precision(precision: str) -> tuple[Mode | None, Mode | None]:
    """TARGET or TARGET+DRAFTER, each int8, int4 or none -> how target and drafter are quantised. Raises
    `InvalidOption`."""
    target, _, drafter = precision.partition("+")
    return _mode(target), _mode(drafter)


def _mode(name: str) -> Mode | None:
    if name in ("", "none"):
        return None
    check_mode(name)
    return cast(Mode, name)


def own_systems(targets: Mapping[str, LLM], order: Comparison) -> dict[System, Write]:
    """Paceline's; `targets`: the model by precision. Drafters of one target share its weights, as all temperatures do
    a drafter. Raises `PacelineError`."""
    found: dict[System, Write] = {}
    for precision, llm in targets.items():
        for name in dict.fromkeys(("none", *order.drafters)):
            spec, size = split_size(name)
            writer = LLM(llm.model, open_drafter(spec, llm.model, split_precision(precision)[1]), size)
            drafter = "" if spec == "none" else name
            for temperature in order.temperatures:
                system = System(OURS, drafter, precision, temperature)
                found[system] = _own(writer, order.sampling(temperature))
    return found


def _own(llm: LLM, sampling: Sampling) -> Write:
    def write(text: str) -> MeasuredReply:
        began, first = time.perf_counter(), 0.0
        with llm.stream(text, sampling) as stream:
            for _ in stream:
                first = first or time.perf_counter() - began
        done = stream.completion
        return MeasuredReply(done.token_ids, first, done.stats)

    return write


def peer_systems(name: str, child: Child, llm: LLM, order: Comparison) -> dict[System, Write]:
    """A peer's: plainly and with its prompt lookup. `llm` renders, so that nobody's template differs."""

    def writer(ask: PeerPrompt) -> Write:
        def write(text: str) -> MeasuredReply:
            began = time.perf_counter()
            rendered = replace(ask, prompt=render(llm, text))
            before = time.perf_counter() - began
            reply = child.ask(rendered)
            return replace(reply, first=before + reply.first)

        return write

    return {
        System(name, drafter, temperature=temperature): writer(PeerPrompt("", temperature, bool(drafter), order.seed))
        for temperature in order.temperatures
        for drafter in ("", "lookup")
    }


def render(llm: LLM, text: str) -> str:
    """The question as the model reads it."""
    if llm.tokenizer.chat_template is None:
        return text
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
