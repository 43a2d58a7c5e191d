"""Recipes: what each kind of drafter supplies for its training. `loop.py` does the rest.

The loss compares every guess with the target's distribution over the tokens that the drafter knows (`draft_loss`);
later steps of a draft count less, since a draft is accepted up to its first wrong token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidOption
from paceline.models.heads import HeadFile, TrainableConfig, taps_of
from paceline.protocols import EmbeddingAndHead
from paceline.train.states import DocumentBatch

UNKNOWN = 1 << 30
"""Rank of a token that is not in the drafter's vocabulary."""

_LIKELY = 8
"""Tokens that the target finds likeliest after each place, which a batch in training scores at all places."""

_OTHERS = 1024
"""Other tokens, drawn at random, that a batch in training scores in place of all others."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Results of a module on a batch: S steps of the drafts that begin at P places of B documents.

    `loss`: summed over all guesses. `right` [S, B, P]: whether a step's best guess is the target's own choice. `real`
    [S, B, P]: where there was something to guess; elsewhere `right` is False. `ranks` [S, B, P]: in evaluation, how
    many tokens the step ranked above the target's choice; `UNKNOWN` where it does not know that token.
    """

    loss: Tensor
    right: Tensor
    real: Tensor
    ranks: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Right guesses and all guesses of each step, [2, S]."""
        return torch.stack([self.right.flatten(1).sum(1), self.real.flatten(1).sum(1)]).cpu()


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """Places in the answers of a batch at which drafts begin.

    A draft begins after each pending token: the last prompt token and every answer token but the last. Place p of
    document b has its pending token at `pending[b, p]`, and step s of its draft guesses the token at `pending + 1 + s`.
    """

    pending: Tensor
    """int64 [B, P], positions within the documents"""
    real: Tensor
    """bool [S, B, P]: whether step s of place p guesses a token of the document"""
    columns: Tensor
    """int64 [P]: how many places after the document's first each one is"""

    def every(self, stride: int, first: int) -> DraftPlaces:
        """Return one place in `stride`, from the place `first` on."""
        chosen = slice(first, None, stride)
        return DraftPlaces(self.pending[:, chosen], self.real[:, :, chosen], self.columns[chosen])

    @staticmethod
    def of(batch: DocumentBatch, steps: int) -> DraftPlaces:
        """Return all places of a batch, for drafts of `steps` tokens."""
        first = (batch.prompts - 1).clamp(min=1)  # a draft needs the state of the token before its pending one
        places = max(1, int((batch.lengths - 1 - first).max()))  # one that is not real where nothing is answered
        device = batch.tokens.device
        pending = first[:, None] + torch.arange(places, device=device)
        reach = torch.arange(1, steps + 1, device=device)[:, None, None]
        real = pending + reach < batch.lengths[:, None]
        return DraftPlaces(pending.clamp(max=batch.tokens.shape[1] - 1), real, torch.arange(places, device=device))


def gather(states: Tensor, places: Tensor) -> Tensor:
    """Return states [B, T, ...] at places [B, P], those past the end clamped to it: [B, P, ...]."""
    rows = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[rows, places.clamp(0, states.shape[1] - 1)]


class Teacher:
    """The target's output head, over the tokens that a drafter knows."""

    def __init__(self, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """`vocabulary` [K]: ascending ids. `rows` float32 [K, H]: their rows of the target's head, on its device."""
        self._target = target
        self.rows = target.head()[vocabulary].float()
        self.vocabulary = vocabulary.to(self.rows.device)

    @torch.no_grad()
    def score(self, batch: DocumentBatch, places: DraftPlaces, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Return the target's view of the tokens after each pending one, in C columns counted from the document's first
        place; a place's steps share columns with the places after it.

        First its logits over the tokens that the drafter knows, float32 [B, C, K]; then the token it would choose,
        int64 [B, C]: `exact`: of all tokens; else of the known ones, which is cheaper.
        """
        steps, columns = len(places.real), places.columns
        reach = torch.arange(int(columns[-1]) + steps, device=columns.device)
        states = gather(batch.states["final"], places.pending[:, :1] - columns[0] + reach)
        scores = F.linear(states.float(), self.rows).float()
        if not exact:
            return scores, self.vocabulary[scores.argmax(-1)]
        with torch.autocast(states.device.type, enabled=False):  # in the target's own precision
            return scores, torch.stack([self._target.logits(row).argmax(-1) for row in states])

    def rank(self, scores: Tensor, choice: Tensor) -> Tensor:
        """Return how many tokens of scores [N, K] rank above the chosen id, int64 [N]; `UNKNOWN` for unknown ids."""
        column = torch.searchsorted(self.vocabulary, choice).clamp(max=len(self.vocabulary) - 1)
        ranks = (scores > scores.gather(1, column[:, None])).sum(-1)
        return ranks.where(self.vocabulary[column] == choice, UNKNOWN)


def simulate_rounds(guesses: Guesses) -> tuple[int, int]:
    """Return (tokens, rounds) of greedy decoding with chains of these guesses: a round that accepts `a` of them commits
    a + 1 tokens."""
    accepted = guesses.right.long().cumprod(0).sum(0)
    tokens = rounds = 0
    for lengths, real in zip(accepted.tolist(), guesses.real[0].sum(1).tolist(), strict=True):
        place = 0
        while place < real:
            step = min(lengths[place] + 1, real - place)
            tokens, rounds, place = tokens + step, rounds + 1, place + step
    return tokens, rounds


@dataclass(frozen=True, slots=True)
class Columns:
    """Tokens of a draft vocabulary that stand for all of them in a batch (sampled softmax; Jean et al.,
    arXiv 1412.2007): the likely ones, and some that were drawn from the others.

    `ids` [C]: their places in the vocabulary. `shift` [C]: logarithm of how many tokens each stands for.
    """

    ids: Tensor
    shift: Tensor

    @staticmethod
    def of(scores: Tensor) -> Columns | None:
        """Choose columns by the target's logits [..., K]; None where that would save less than half."""
        size = scores.shape[-1]
        if size < 4 * _OTHERS:
            return None
        likely = torch.zeros(size, dtype=torch.bool, device=scores.device)
        likely[scores.topk(_LIKELY, -1).indices.flatten()] = True
        others = (~likely).nonzero()[:, 0]
        if len(others) < size // 2:
            return None
        drawn = others[torch.randperm(len(others), device=scores.device)[:_OTHERS]]
        ids = torch.cat([likely.nonzero()[:, 0], drawn])
        shift = torch.zeros(len(ids), device=scores.device)
        shift[-len(drawn) :] = math.log(len(others) / len(drawn))
        return Columns(ids, shift)


def draft_loss(wanted: Tensor, logits: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return the summed loss of guesses: -log of the chance that a sampled guess is accepted, and half the
    cross-entropy, which also teaches where that chance is small (LK losses, arXiv 2602.23881).

    `wanted`, `logits` [N, C]: the target's and the drafter's logits of the columns; `wanted` holds `Columns.shift`
    already, `logits` do not.
    """
    shift = logits.new_zeros(()) if shift is None else shift
    target, scores = wanted.softmax(-1), (logits + shift).log_softmax(-1)
    accepted = torch.minimum(target, scores.exp()).sum(-1).clamp(min=1e-6)
    return -accepted.log().sum() - 0.5 * (target * (scores - shift)).sum()


class GuessTally:
    """Collects the guesses of a batch, step by step, into `Guesses`."""

    def __init__(
        self, teacher: Teacher, batch: DocumentBatch, places: DraftPlaces, decay: float, *, exact: bool
    ) -> None:
        """`decay`: the weight of a step's loss relative to the step before. `exact`: see `Teacher.score`; not exact,
        a part of the vocabulary may stand for it (`Columns`)."""
        self._teacher, self._places, self._decay = teacher, places, decay
        self._scores, self._choice = teacher.score(batch, places, exact=exact)
        self._columns = None if exact else Columns.of(self._scores)
        if self._columns:
            self._scores = self._scores[..., self._columns.ids] + self._columns.shift
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def rows(self, head: Tensor) -> Tensor:
        """Return the rows of an output head [K, H] over the draft vocabulary that make the logits of `add` [C, H]."""
        return head[self._columns.ids] if self._columns else head

    def add(self, logits: Tensor) -> None:
        """Add the next step: `logits` [N, C] at its real places in order."""
        step = len(self._losses)
        real, columns = self._places.real[step], self._places.columns + step
        wanted = self._scores[:, columns][real]
        logits, shift = logits.float(), self._columns.shift if self._columns else None
        self._losses.append(draft_loss(wanted, logits, shift) * self._decay**step)
        choice = self._choice[:, columns][real]
        self._right.append(torch.zeros_like(real))
        best = logits.detach().argmax(-1)
        self._right[-1][real] = self._teacher.vocabulary[self._columns.ids[best] if self._columns else best] == choice
        if not torch.is_grad_enabled():
            self._ranks.append(torch.full_like(real, UNKNOWN, dtype=torch.int64))
            self._ranks[-1][real] = self._teacher.rank(logits, choice)

    def add_single_step(self, logits: Tensor) -> None:
        """Add all steps of a drafter that has one: `logits` [N, C] after each pending token, at the real places of the
        first step. The later steps of a draft are the first ones of the places after it."""
        self.add(logits)
        first = F.pad(self._right[0], (0, len(self._places.real) - 1))
        places = self._places.pending.shape[1]
        for step in range(1, len(self._places.real)):
            self._right.append(first[:, step : step + places] & self._places.real[step])

    def guesses(self) -> Guesses:
        """Return what was added."""
        ranks = torch.stack(self._ranks) if self._ranks else None
        return Guesses(torch.stack(self._losses).sum(), torch.stack(self._right), self._places.real, ranks)


class Recipe(ABC):
    """A drafter in training. `module` holds float32 parameters under the names of `models/heads.py`."""

    config: TrainableConfig
    module: nn.Module
    decay = 0.8
    """Weight of a step's loss relative to the step before."""

    def __init__(
        self, config: TrainableConfig, module: nn.Module, target: EmbeddingAndHead, vocabulary: Tensor, steps: int
    ) -> None:
        """`vocabulary` [K]: the ids, ascending, over which distributions are compared. `steps`: tokens of the drafts
        that it is trained for."""
        self.config, self.module, self.target = config, module, target
        self.taps, self.steps = taps_of(config), steps
        self.teacher = Teacher(target, vocabulary)

    def guess(self, batch: DocumentBatch) -> Guesses:
        """Run the module over the answers of a batch; in `module.eval()` the target's choice is the exact one."""
        places = self.places(batch)
        tally = GuessTally(self.teacher, batch, places, self.decay, exact=not self.module.training)
        self.draft(batch, places, tally)
        return tally.guesses()

    def places(self, batch: DocumentBatch) -> DraftPlaces:
        """Return where drafts begin."""
        return DraftPlaces.of(batch, self.steps)

    @abstractmethod
    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        """Run the module and add its logits at each step to `tally`."""

    def evaluated(self, guesses: Sequence[Guesses]) -> None:  # noqa: B027
        """Take note of the guesses on held-out documents, in a recipe that can use them."""

    @torch.no_grad()
    def start_at_unit_logits(self, norm: nn.RMSNorm) -> None:
        """Scale the final norm so that logits begin with a standard deviation of 1: at the target's own scale, those of
        an untrained head are confident nonsense, and much of the training would go into unlearning them."""
        norm.weight.fill_(1 / (self.teacher.rows.std() * norm.weight.numel() ** 0.5))

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """Begin with the weights of a trained drafter. Raises `InvalidOption` for one of another kind or shape."""
        ours, theirs = self.config, head.config
        if type(ours) is not type(theirs):
            raise InvalidOption(f"{head.path} holds a drafter of another kind", "Name one of the kind to be trained")
        for name in (f.name for f in fields(ours) if f.name not in _MAY_DIFFER):
            if getattr(ours, name) != getattr(theirs, name):
                raise _mismatch(head, f"{name} {getattr(theirs, name)!r}, not {getattr(ours, name)!r}")
        for name, parameter in self.module.named_parameters():
            given = head.tensors.get(name)
            if given is None or given.shape != parameter.shape:
                has = "no" if given is None else f"a {list(given.shape)} instead of a {list(parameter.shape)}"
                raise _mismatch(head, f"{has} {name}")
            parameter.copy_(given)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is written, under the names of `models/heads.py`: weights in bfloat16."""
        return {n: p.detach().to("cpu", torch.bfloat16) for n, p in self.module.named_parameters()}


_MAY_DIFFER = ("layer", "draft_vocab", "paths")
"""Fields of a config that tensors tell better, or that training decides."""


def _mismatch(head: HeadFile, difference: str) -> InvalidOption:
    return InvalidOption(
        f"training cannot begin from {head.path}: it has {difference}",
        "Repeat the options it was made with (see its README.md), or leave out --from",
    )
