"""What a kind of drafter must say to be trained: everything else is `loop.py`'s."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidOption
from paceline.models.heads import HeadConfig, HeadFile
from paceline.protocols import EmbeddingAndHead
from paceline.train.states import DocumentBatch
from paceline.types import Tap

UNKNOWN = 1 << 30
"""The rank of a token that is not in the drafter's vocabulary."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a module says of a batch: S steps of the drafts that begin at P places of B documents.

    `loss`: summed over all. `right` [S, B, P]: whether a step's best guess is the target's own choice. `real`
    [S, B, P]: where there was something to guess; elsewhere `right` is False. `ranks` [S, B, P]: in evaluation, how
    many tokens the step thought likelier than the target's choice; `UNKNOWN` where it does not know that one.
    """

    loss: Tensor
    right: Tensor
    real: Tensor
    ranks: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """[2, S]: right guesses and all guesses of each step."""
        return torch.stack([self.right.flatten(1).sum(1), self.real.flatten(1).sum(1)]).cpu()


class Recipe(ABC):
    """A drafter in training. `module` holds float32 parameters under the names of `models/heads.py`."""

    taps: tuple[Tap, ...]
    """What `guess` needs of the target besides "final"."""

    module: nn.Module
    steps: int
    """Tokens of the drafts that it is trained for."""

    @property
    @abstractmethod
    def config(self) -> HeadConfig: ...

    @abstractmethod
    def guess(self, batch: DocumentBatch) -> Guesses:
        """Run the module over the answers of a batch; in `module.eval()` the target's choice is the exact one."""

    def measured(self, looks: Sequence[Guesses]) -> None:  # noqa: B027
        """What a look at the held-out documents found, for a recipe that can use it."""

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """Begin with the weights of a trained drafter. Raises `InvalidOption` for one of another kind or shape."""
        ours, theirs = self.config, head.config
        if type(ours) is not type(theirs):
            raise InvalidOption(f"{head.path} is no drafter of the kind to be trained", "Name one of the same kind")
        for name in (f.name for f in fields(ours) if f.name not in _MAY_DIFFER):
            if getattr(ours, name) != getattr(theirs, name):
                raise _unlike(head, f"{name} {getattr(theirs, name)!r}, not {getattr(ours, name)!r}")
        for name, parameter in self.module.named_parameters():
            given = head.tensors.get(name)
            if given is None or given.shape != parameter.shape:
                has = "no" if given is None else f"a {list(given.shape)} instead of a {list(parameter.shape)}"
                raise _unlike(head, f"{has} {name}")
            parameter.copy_(given)

    def tensors(self) -> dict[str, Tensor]:
        """What is written, under the names of `models/heads.py`, in bfloat16 where it is a weight."""
        return {n: p.detach().to("cpu", torch.bfloat16) for n, p in self.module.named_parameters()}


_MAY_DIFFER = ("layer", "draft_vocab", "paths")
"""Of a config: what tensors tell better, or what training decides."""


def _unlike(head: HeadFile, difference: str) -> InvalidOption:
    return InvalidOption(
        f"training cannot begin from {head.path}: it has {difference}",
        "Repeat the options that it was made with (its README.md has them), or begin without --from",
    )


@dataclass(frozen=True, slots=True)
class Answered:
    """Where the answers of a batch lie, so that recipes agree on what is a guess.

    A draft begins after each pending token, the last prompt token and every answer token but the last: place p of
    document b pends at `pending[b, p]`, and step s of its draft guesses the token at `pending + 1 + s`.
    """

    pending: Tensor
    """int64 [B, P], within the documents"""
    real: Tensor
    """bool [S, B, P]: step s of place p guesses a token of the document"""
    columns: Tensor
    """int64 [P]: how many places after the document's first each one is"""

    def every(self, stride: int, first: int) -> Answered:
        """One place in `stride`, from the place `first` on: neighbouring drafts teach much the same."""
        chosen = slice(first, None, stride)
        return Answered(self.pending[:, chosen], self.real[:, :, chosen], self.columns[chosen])

    @staticmethod
    def of(batch: DocumentBatch, steps: int) -> Answered:
        first = (batch.prompts - 1).clamp(min=1)  # a draft needs the state of the token before its pending one
        places = max(1, int((batch.lengths - 1 - first).max()))  # one that is not real where nothing is answered
        device = batch.tokens.device
        pending = first[:, None] + torch.arange(places, device=device)
        reach = torch.arange(1, steps + 1, device=device)[:, None, None]
        real = pending + reach < batch.lengths[:, None]
        return Answered(pending.clamp(max=batch.tokens.shape[1] - 1), real, torch.arange(places, device=device))


def take(states: Tensor, places: Tensor) -> Tensor:
    """states [B, T, ...] at places [B, P], those past the end clamped to it: [B, P, ...]."""
    rows = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[rows, places.clamp(0, states.shape[1] - 1)]


def walk(guesses: Guesses) -> tuple[int, int]:
    """(tokens, rounds) of greedy decoding with chains of these guesses.

    A round that accepts a guesses goes on a + 1 places further.
    """
    accepted = guesses.right.long().cumprod(0).sum(0)
    tokens = rounds = 0
    for line, real in zip(accepted.tolist(), guesses.real[0].sum(1).tolist(), strict=True):
        place = 0
        while place < real:
            step = min(line[place] + 1, real - place)
            tokens, rounds, place = tokens + step, rounds + 1, place + step
    return tokens, rounds


@dataclass(frozen=True, slots=True)
class Taught:
    """What the target thinks of the tokens after each pending one, in columns from the document's first place on, which
    the steps share.

    `scores` float32 [B, C, K]: its logits over the K tokens that the drafter knows. `choice` int64 [B, C]: the one it
    would choose, of all tokens in evaluation, of the known ones in training, where that is cheaper.
    """

    scores: Tensor
    choice: Tensor


class Teacher:
    """The target's head, over the tokens that a drafter knows."""

    def __init__(self, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """`vocabulary` [K]: ascending ids. `kept` float32 [K, H]: their rows of the target's head, on its device."""
        self._target = target
        self.kept = target.head()[vocabulary].float()
        self.vocabulary = vocabulary.to(self.kept.device)

    @torch.no_grad()
    def of(self, batch: DocumentBatch, answered: Answered, *, exact: bool) -> Taught:
        """`exact`: choose of all tokens."""
        steps, columns = len(answered.real), answered.columns
        reach = torch.arange(int(columns[-1]) + steps, device=columns.device)
        states = take(batch.states["final"], answered.pending[:, :1] - columns[0] + reach)
        scores = F.linear(states.float(), self.kept).float()
        if not exact:
            return Taught(scores, self.vocabulary[scores.argmax(-1)])
        with torch.autocast(states.device.type, enabled=False):  # in the target's own precision
            return Taught(scores, torch.stack([self._target.logits(line).argmax(-1) for line in states]))

    def rank(self, said: Tensor, choice: Tensor) -> Tensor:
        """How many of a row's tokens [N, K] are likelier than the chosen one, an id [N]; `UNKNOWN` without that one."""
        column = torch.searchsorted(self.vocabulary, choice).clamp(max=len(self.vocabulary) - 1)
        ranks = (said > said.gather(1, column[:, None])).sum(-1)
        return ranks.where(self.vocabulary[column] == choice, UNKNOWN)


class GuessTally:
    """Collects the guesses of a batch, step by step, into `Guesses`."""

    def __init__(self, teacher: Teacher, taught: Taught, answered: Answered, decay: float) -> None:
        """`decay`: the weight of a step's loss over that of the step before."""
        self._teacher, self._taught, self._answered, self._decay = teacher, taught, answered, decay
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def once(self, logits: Tensor) -> None:
        """`logits` [N, K]: of a drafter without steps, at the real places of the first: what it says after each
        pending token. The later steps of a draft are then the first ones of the places after it."""
        self.add(logits)
        first = F.pad(self._right[0], (0, len(self._answered.real) - 1))
        places = self._answered.pending.shape[1]
        for step in range(1, len(self._answered.real)):
            self._right.append(first[:, step : step + places] & self._answered.real[step])

    def add(self, logits: Tensor) -> None:
        """`logits` [N, K]: the next step's, at its real places in order. The loss is the cross-entropy against the
        target's distribution over the same tokens."""
        step = len(self._losses)
        real, columns = self._answered.real[step], self._answered.columns + step
        wanted = self._taught.scores[:, columns][real]
        said = logits.float().log_softmax(-1)
        self._losses.append(-(wanted.softmax(-1) * said).sum() * self._decay**step)
        choice = self._taught.choice[:, columns][real]
        self._right.append(torch.zeros_like(real))
        self._right[-1][real] = self._teacher.vocabulary[said.detach().argmax(-1)] == choice
        if not torch.is_grad_enabled():
            self._ranks.append(torch.full_like(real, UNKNOWN, dtype=torch.int64))
            self._ranks[-1][real] = self._teacher.rank(said, choice)

    def guesses(self) -> Guesses:
        ranks = torch.stack(self._ranks) if self._ranks else None
        return Guesses(torch.stack(self._losses).sum(), torch.stack(self._right), self._answered.real, ranks)
