"""A target that already knows its text. The engine runs on it as on a model, but only the drafters compute.

With the rule `match`, a text does not depend on the drafter. So with any drafter, the target would write the recorded
text, and its choice at each visited row is the next recorded token. Everything else is real: the engine's rounds, draft
budgets, trees, stop conditions, the drafters, and the shared noise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.bench.replay.prices import Prices
from paceline.cache.slots import SlotTable
from paceline.errors import InvalidOption
from paceline.protocols import KVCache, Saved, Target
from paceline.recording.states import StateFiles
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import DraftBudget, Forward, Rows, Tap, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, pack_prefix

Fit = Callable[[int, DraftBudget], DraftBudget]
"""(committed length, budget) -> the part of the budget that the next pass can verify."""


class VirtualClock:
    """A clock in seconds that advances only when time is charged."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


@dataclass(slots=True)
class TextSampler(Sampler):
    """A sampler that chooses the next token of a text. Drafters rank with it as with the sampler that wrote the text.

    Attributes:
        text: Token ids of prompt and reply.
        price: Time to charge for a choice in seconds.
        clock: Clock to charge.
    """

    text: Sequence[int] = ()
    price: float = 0.0
    clock: VirtualClock | None = None

    @staticmethod
    def of(sampler: Sampler, text: Sequence[int], price: float, clock: VirtualClock) -> TextSampler:
        """Copy a sampler, but choose the tokens of a text."""
        own = {field.name: getattr(sampler, field.name) for field in fields(Sampler)}
        return TextSampler(**own, text=text, price=price, clock=clock)

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        if self.clock:
            self.clock.charge(self.price)
        # Tokens after the end of the text are unknown. They are cut off, so any token will do.
        return self.text[len(prefix)] if len(prefix) < len(self.text) else 0


def fit_of(target: Target) -> Fit:
    """Return a function that cuts draft budgets as the target's cache does."""
    cache = target.new_cache()
    slot = cache.acquire()

    def fit(length: int, budget: DraftBudget) -> DraftBudget:
        if isinstance(cache, SlotTable):
            cache.lengths[slot] = length
        return cache.fit(slot, budget)

    return fit


@dataclass(frozen=True, slots=True)
class SavedLength(Saved):
    """The saved length of a text, without the tensors of a cache."""

    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.size


class CannotReplay(InvalidOption):
    """The drafter needs the target itself, not only its text and its hidden states."""

    def __init__(self) -> None:
        super().__init__(
            "a drafter that runs the target's own layers cannot be replayed", "Measure it with `paceline bench`"
        )


class TextCache(SlotTable):
    """A cache that keeps only lengths, and cuts budgets like the target's cache."""

    def __init__(self, fit: Fit, position_bytes: int) -> None:
        super().__init__()
        self._fit, self._position = fit, position_bytes

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """See `protocols.KVCache.fit`."""
        return self._fit(self.lengths[slot], budget)

    def fork(self, slot: int) -> int:
        """See `protocols.KVCache.fork`."""
        new = self.acquire(self.prompts[slot], self.adapters[slot])
        self.lengths[new] = self.lengths[slot]
        return new

    def truncate(self, slot: int, length: int) -> None:
        """See `protocols.KVCache.truncate`."""
        self.check_length(slot, length)
        self.lengths[slot] = length

    def save(self, slot: int) -> SavedLength:
        """See `protocols.KVCache.save`."""
        return SavedLength(self.lengths[slot], (), self._position * self.lengths[slot])

    def load(self, slot: int, saved: SavedLength, length: int) -> int:
        """See `protocols.KVCache.load`."""
        self.lengths[slot] = length
        return length

    def begin(self, rows: Rows) -> NoReturn:
        """Raise `CannotReplay`, since there are no keys and values to attend to."""
        raise CannotReplay

    def _move(self, slot: int, source: list[int], target: list[int]) -> None: ...


class TargetStates:
    """The target's hidden states for texts, read from disk or computed by a prefill of each text."""

    def __init__(self, target: Target, folder: Path | None = None, limit: int = 1 << 30) -> None:
        """Prepare to read states.

        Args:
            target: The target.
            folder: Folder with states that were stored while the texts were written.
            limit: Maximum size of the states in memory, in bytes. The least recently used ones are dropped.
        """
        self._target, self._limit, self._held = target, limit, 0
        self._folder = folder if folder and folder.is_dir() else None
        self._kept: OrderedDict[tuple[Sequence[int], tuple[Tap, ...]], Mapping[Tap, Tensor]] = OrderedDict()

    def of(self, text: Sequence[int], taps: tuple[Tap, ...]) -> Mapping[Tap, Tensor]:
        """Return tap -> states of every token, [len(text), H].

        Stored states lack the last two tokens, which no drafter reads.
        """
        if not taps:
            return {}
        key = (tuple(text), taps)
        if key not in self._kept:
            self._kept[key] = self._stored(text, taps) or self._compute(text, taps)
            self._held += _bytes(self._kept[key])
        self._kept.move_to_end(key)
        while self._held > self._limit and len(self._kept) > 1:
            self._held -= _bytes(self._kept.popitem(last=False)[1])
        return self._kept[key]

    def _stored(self, text: Sequence[int], taps: tuple[Tap, ...]) -> Mapping[Tap, Tensor] | None:
        # No pass sees the last token of a text, and no drafter sees the last pass.
        found = StateFiles(self._folder, taps, 0).read(text[:-2]) if self._folder else None
        return found and {tap: found[tap].to(self._target.device) for tap in taps}

    @torch.inference_mode()
    def _compute(self, text: Sequence[int], taps: tuple[Tap, ...]) -> Mapping[Tap, Tensor]:
        cache = self._target.new_cache()
        slot = cache.acquire(len(text))
        parts: dict[Tap, list[Tensor]] = {tap: [] for tap in taps}
        for start in range(0, len(text), PREFILL_ROWS):
            chunk = list(text[start : start + PREFILL_ROWS])
            rows = pack_prefix(chunk, slot, start, self._target.device)
            out = self._target.forward(rows, cache, Want("none", taps=taps)).taps
            cache.commit(rows, [range(1, len(chunk))])
            for tap in taps:
                # Copy the states: a view would keep the padding rows of the pass in memory.
                parts[tap].append(out[tap][0, : len(chunk)].clone())
        return {tap: torch.cat(part) for tap, part in parts.items()}


def _bytes(states: Mapping[Tap, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in states.values())


class TextTarget:
    """A `Target` with passes that charge their price and return the hidden states of the recorded text.

    Attributes:
        rows: Total rows of all verifying passes so far.
        on_verify: Called with the number of rows in every verifying pass.
    """

    device = torch.device("cpu")

    def __init__(
        self, target: Target, states: TargetStates, prices: Prices, clock: VirtualClock, slowdown: float
    ) -> None:
        """Stand in for `target`. The price of a verifying pass is multiplied by `slowdown`."""
        self.vocab_size, self.context_length, self._slowdown = target.vocab_size, target.context_length, slowdown
        self._fit, self._states, self._prices, self._clock = fit_of(target), states, prices, clock
        self._texts: dict[int, Sequence[int]] = {}
        self._seen: dict[int, Mapping[Tap, Tensor]] = {}
        self.rows = 0
        self.on_verify: Callable[[int], object] = lambda rows: None

    def new_cache(self) -> TextCache:
        return TextCache(self._fit, self._prices.position_bytes)

    def set_text(self, slot: int, text: Sequence[int]) -> None:
        """Set the text of a slot."""
        self._texts[slot] = text
        self._seen.pop(slot, None)

    def forward(self, rows: Rows, cache: KVCache[Any], want: Want) -> Forward:
        assert isinstance(cache, TextCache)
        count = sum(rows.counts)
        cache.note_pass(rows)
        if rows.prefill:
            self._clock.charge(self._prices.prefill(count, rows.lengths[0]))
        else:
            self._clock.charge(self._slowdown * self._prices.round(count, rows.lengths))
            self.rows += max(MIN_ROWS, count)
            self.on_verify(count)
        return Forward(torch.empty(*rows.tokens.shape, 0), self._taps(rows, want.taps))

    def _taps(self, rows: Rows, taps: tuple[Tap, ...]) -> dict[Tap, Tensor]:
        """Return the taps [B, T, H] of a pass. Rows that are not part of the text are never read, so any state will
        do."""
        found: dict[Tap, list[Tensor]] = {tap: [] for tap in taps}
        for slot, positions in zip(rows.slots, rows.positions, strict=True) if taps else ():
            if slot not in self._seen:
                self._seen[slot] = self._states.of(self._texts[slot], taps)
            for tap, states in self._seen[slot].items():
                found[tap].append(states[positions.clamp(max=len(states) - 1).to(states.device)])
        return {tap: torch.stack(parts) for tap, parts in found.items()}
