"""Recipes: the part of training that differs between kinds of drafters. `loop.py` is the common part.

The loss compares every guess with the target's distribution over the tokens that the drafter knows (`draft_loss`).
Later steps of a draft count less, since a draft is accepted only up to its first wrong token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

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
"""Number of the target's most likely tokens at each place. A training batch scores these tokens at all places."""

_OTHERS = 1024
"""Number of randomly drawn tokens that represent all other tokens in a training batch."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses of a module on a batch: S steps of the drafts that begin at P places of B documents.

    Attributes:
        loss: Sum of the loss over all guesses.
        right: bool [S, B, P], True if a step's best guess is the target's choice.
        real: bool [S, B, P], True if there was a token to guess. Elsewhere `right` is False.
        ranks: int64 [S, B, P], only in evaluation: number of tokens that the step ranked above the target's choice, or
            `UNKNOWN` if the drafter does not know that token.
    """

    loss: Tensor
    right: Tensor
    real: Tensor
    ranks: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Number of right guesses and of all guesses of each step, [2, S]."""
        return torch.stack([self.right.flatten(1).sum(1), self.real.flatten(1).sum(1)]).cpu()


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """Places in the answers of a batch at which drafts begin.

    A draft begins after each pending token: the last prompt token, and every answer token except the last. Place p of
    document b has its pending token at `pending[b, p]`, and step s of its draft guesses the token at `pending + 1 + s`.

    Attributes:
        pending: Positions in the documents, int64 [B, P].
        real: bool [S, B, P], True if step s of place p guesses a token of the document.
        columns: Number of places between the document's first place and each place, int64 [P].
    """

    pending: Tensor
    real: Tensor
    columns: Tensor

    def every(self, stride: int, first: int) -> DraftPlaces:
        """Return every `stride`-th place, starting with place `first`."""
        chosen = slice(first, None, stride)
        return DraftPlaces(self.pending[:, chosen], self.real[:, :, chosen], self.columns[chosen])

    @staticmethod
    def of(batch: DocumentBatch, steps: int) -> DraftPlaces:
        """Return all places of a batch, for drafts of `steps` tokens."""
        first = (batch.prompts - 1).clamp(min=1)  # a draft needs the state before its pending token
        places = max(1, int((batch.lengths - 1 - first).max()))  # without answers, one place that is not real
        device = batch.tokens.device
        pending = first[:, None] + torch.arange(places, device=device)
        reach = torch.arange(1, steps + 1, device=device)[:, None, None]
        real = pending + reach < batch.lengths[:, None]
        return DraftPlaces(pending.clamp(max=batch.tokens.shape[1] - 1), real, torch.arange(places, device=device))


def gather(states: Tensor, places: Tensor) -> Tensor:
    """Return states [B, T, ...] at places [B, P] as [B, P, ...]. Places past the end return the last state."""
    rows = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[rows, places.clamp(0, states.shape[1] - 1)]


class Teacher:
    """The target's output head over the tokens that a drafter knows."""

    def __init__(self, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """Copy the rows [K, H] of the target's head for the ascending token ids `vocabulary` [K]."""
        self._target = target
        self.rows = target.head()[vocabulary].float()
        self.vocabulary = vocabulary.to(self.rows.device)

    @torch.no_grad()
    def score(self, batch: DocumentBatch, places: DraftPlaces, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Compute the target's logits and choices after each pending token.

        Columns are counted from the document's first place. A step of a place shares its column with a later place.

        Args:
            batch: The documents.
            places: The places at which drafts begin.
            exact: True to choose among all tokens, False to choose among the known tokens, which is cheaper.

        Returns:
            Logits over the tokens that the drafter knows, float32 [B, C, K], and the chosen tokens, int64 [B, C].
        """
        steps, columns = len(places.real), places.columns
        reach = torch.arange(int(columns[-1]) + steps, device=columns.device)
        states = gather(batch.states["final"], places.pending[:, :1] - columns[0] + reach)
        scores = F.linear(states.float(), self.rows).float()
        if not exact:
            return scores, self.vocabulary[scores.argmax(-1)]
        with torch.autocast(states.device.type, enabled=False):  # use the target's own precision
            return scores, torch.stack([self._target.logits(row).argmax(-1) for row in states])

    @property
    def d2t(self) -> Tensor:
        """The known tokens as the map d2t of a drafter's file (see `models/heads.py`)."""
        return self.vocabulary.cpu() - torch.arange(len(self.vocabulary))

    def rank(self, scores: Tensor, choice: Tensor) -> Tensor:
        """Return how many tokens of scores [N, K] rank above the chosen id, int64 [N]. Unknown ids give `UNKNOWN`."""
        column = torch.searchsorted(self.vocabulary, choice).clamp(max=len(self.vocabulary) - 1)
        ranks = (scores > scores.gather(1, column[:, None])).sum(-1)
        return ranks.where(self.vocabulary[column] == choice, UNKNOWN)


def simulate_rounds(guesses: Guesses) -> tuple[int, int]:
    """Simulate greedy decoding with chains of these guesses. A round that accepts n guesses commits n + 1 tokens.

    Returns:
        Number of tokens and number of rounds.
    """
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
    """Tokens that represent a whole draft vocabulary in a batch (sampled softmax; Jean et al., arXiv 1412.2007).

    They are the likely tokens, and a random sample of all other tokens.

    Attributes:
        ids: Places of the tokens in the draft vocabulary, [C].
        shift: Logarithm of the number of tokens that each token represents, [C].
    """

    ids: Tensor
    shift: Tensor

    @staticmethod
    def of(scores: Tensor) -> Columns | None:
        """Choose tokens by the target's logits [..., K]. Return None if that would save less than half of the work."""
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
    """Compute the loss of guesses (LK losses, arXiv 2602.23881).

    It is -log of the probability that a sampled guess is accepted, plus half the cross-entropy, which still has a
    gradient where that probability is small.

    Args:
        wanted: The target's logits of the columns, including `shift`, [N, C].
        logits: The drafter's logits of the columns, without `shift`, [N, C].
        shift: See `Columns`.

    Returns:
        Sum over all guesses.
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
        """Score a batch with the teacher.

        Args:
            teacher: The target's output head.
            batch: The documents.
            places: The places at which drafts begin.
            decay: Weight of a step's loss relative to the previous step.
            exact: See `Teacher.score`. If False, a part of the vocabulary may represent the whole (`Columns`).
        """
        self._teacher, self._places, self._decay = teacher, places, decay
        self._scores, self._choice = teacher.score(batch, places, exact=exact)
        self._columns = None if exact else Columns.of(self._scores)
        if self._columns:
            self._scores = self._scores[..., self._columns.ids] + self._columns.shift
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def rows(self, head: Tensor) -> Tensor:
        """Return the rows [C, H] of an output head [K, H] over the draft vocabulary that `add` needs logits of."""
        return head[self._columns.ids] if self._columns else head

    def add(self, logits: Tensor) -> None:
        """Add the next step with logits [N, C] at its real places, in order."""
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
        """Add all steps of a drafter that learns a single step.

        A later step of a draft equals the first step at a later place.

        Args:
            logits: [N, C] at the real places of the first step, in order.
        """
        self.add(logits)
        first = F.pad(self._right[0], (0, len(self._places.real) - 1))
        places = self._places.pending.shape[1]
        for step in range(1, len(self._places.real)):
            self._right.append(first[:, step : step + places] & self._places.real[step])

    def guesses(self) -> Guesses:
        """Return all guesses that were added."""
        ranks = torch.stack(self._ranks) if self._ranks else None
        return Guesses(torch.stack(self._losses).sum(), torch.stack(self._right), self._places.real, ranks)


class Recipe(ABC):
    """A drafter in training. The float32 parameters of `module` are named as in `models/heads.py`."""

    config: TrainableConfig
    module: nn.Module
    decay = 0.8
    """Weight of a step's loss relative to the previous step."""

    def __init__(
        self, config: TrainableConfig, module: nn.Module, target: EmbeddingAndHead, vocabulary: Tensor, steps: int
    ) -> None:
        """Initialise a recipe.

        Args:
            config: Config of the drafter.
            module: Network to train.
            target: The target's embedding and output head.
            vocabulary: Token ids over which distributions are compared, ascending, [K].
            steps: Draft length to train for, in tokens.
        """
        self.config, self.module, self.target = config, module, target
        self.taps, self.steps = taps_of(config), steps
        self.teacher = Teacher(target, vocabulary)

    def guess(self, batch: DocumentBatch) -> Guesses:
        """Run the module over the answers of a batch. In `eval` mode, the target's choices are exact."""
        places = self.places(batch)
        tally = GuessTally(self.teacher, batch, places, self.decay, exact=not self.module.training)
        self.draft(batch, places, tally)
        return tally.guesses()

    def places(self, batch: DocumentBatch) -> DraftPlaces:
        """Return the places where drafts begin."""
        return DraftPlaces.of(batch, self.steps)

    @abstractmethod
    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        """Run the module and add its logits at each step to `tally`."""

    def evaluated(self, guesses: Sequence[Guesses]) -> None:  # noqa: B027
        """Use the guesses on held-out documents. The default does nothing."""

    @torch.no_grad()
    def start_at_unit_logits(self, norm: nn.RMSNorm) -> None:
        """Scale the final norm so that logits begin with a standard deviation of 1.

        At the target's scale, an untrained head would make confident wrong guesses, and much of the training would be
        spent on unlearning them.
        """
        norm.weight.fill_(1 / (self.teacher.rows.std() * norm.weight.numel() ** 0.5))

    @torch.no_grad()
    def begin_from(self, head: HeadFile) -> None:
        """Begin with the weights of a trained drafter.

        Raises:
            InvalidOption: If it is of another kind or shape.
        """
        ours, theirs = self.config, head.config
        if type(ours) is not type(theirs):
            raise InvalidOption(
                f"{head.path} is a drafter of another kind", "Pass --from a drafter of the kind that you train"
            )
        for name in (f.name for f in fields(ours) if f.name not in _MAY_DIFFER):
            if getattr(ours, name) != getattr(theirs, name):
                raise _mismatch(head, f"{name} {getattr(theirs, name)!r}, not {getattr(ours, name)!r}")
        for name, parameter in self.module.named_parameters():
            given = head.tensors.get(name)
            if given is None or given.shape != parameter.shape:
                has = "no" if given is None else f"a {list(given.shape)} instead of a {list(parameter.shape)}"
                raise _mismatch(head, f"{has} {name}")
            parameter.copy_(given)

    def by_token(self, head: HeadFile, name: str, parameter: Tensor) -> HeadFile:
        """Return a trained head whose tensor `name` has a row for each token that this drafter knows, in its order.

        Args:
            head: The head. It may know other tokens, or be of another kind, and is then returned as it is.
            name: Tensor with a row for each token that the head knows.
            parameter: Rows for tokens that the head does not know, [K, *].
        """
        theirs = head.tensors.get(name)
        if type(head.config) is not type(self.config) or theirs is None:
            return head
        tokens = torch.arange(len(theirs)) + head.tensors.get("d2t", torch.zeros(len(theirs), dtype=torch.int64))
        vocabulary = self.teacher.vocabulary.cpu()
        row = torch.full((int(max(tokens.max(), vocabulary.max())) + 1,), -1)
        row[tokens] = torch.arange(len(theirs))
        row = row[vocabulary]
        rows = parameter.detach().clone()
        rows[row >= 0] = theirs[row[row >= 0]].to(rows)
        return replace(head, tensors=dict(head.tensors) | {name: rows})

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights to write, in bfloat16, under the names of `models/heads.py`."""
        return {n: p.detach().to("cpu", torch.bfloat16) for n, p in self.module.named_parameters()}


_MAY_DIFFER = ("layer", "draft_vocab", "paths")
"""Config fields that may differ: tensor shapes are compared instead, or training decides them."""


def _mismatch(head: HeadFile, difference: str) -> InvalidOption:
    return InvalidOption(
        f"training cannot begin from {head.path}: it has {difference}",
        "Repeat the options that it was trained with (see its README.md), or leave out --from",
    )
