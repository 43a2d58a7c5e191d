"""A target that knows its text: the engine runs on it as on a model, and only the drafters compute.

Under the rule `match` a text does not depend on the drafter. So a recorded text is the one that the target would write
under any of them, and what the target says at a row that a round visits is the recorded token after it. The rest is the
real thing: the engine's rounds, draft budgets, trees, stop conditions, the drafters and the noise that they share.
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
"""(committed length, budget) -> the part of it that the next pass can verify."""


class VirtualClock:
    """Time that passes when something is charged for, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(slots=True)
class TextSampler(Sampler):
    """A sampler that chooses the next token of `text`. Drafters rank with it as with the one that wrote the text.

    `price`: seconds of a choice.
    """

    text: Sequence[int] = ()
    price: float = 0.0
    clock: VirtualClock | None = None

    @staticmethod
    def of(sampler: Sampler, text: Sequence[int], price: float, clock: VirtualClock) -> TextSampler:
        """Return this sampler, with the choices of a text."""
        own = {field.name: getattr(sampler, field.name) for field in fields(Sampler)}
        return TextSampler(**own, text=text, price=price, clock=clock)

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        if self.clock:
            self.clock.charge(self.price)
        # Beyond its end a text is not known. What is chosen there is cut off.
        return self.text[len(prefix)] if len(prefix) < len(self.text) else 0


def fit_of(target: Target) -> Fit:
    """Return how the target's caches cut draft budgets."""
    cache = target.new_cache()
    slot = cache.acquire()

    def fit(length: int, budget: DraftBudget) -> DraftBudget:
        if isinstance(cache, SlotTable):
            cache.lengths[slot] = length
        return cache.fit(slot, budget)

    return fit


@dataclass(frozen=True, slots=True)
class SavedLength(Saved):
    """Saved length of a text, without a cache's tensors."""

    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.size


class CannotReplay(InvalidOption):
    """A drafter that needs more of the target than its text and its hidden states."""

    def __init__(self) -> None:
        super().__init__(
            "a drafter that runs the target's own layers cannot be replayed", "Measure it with `paceline bench`"
        )


class TextCache(SlotTable):
    """A cache that keeps lengths, and cuts budgets as the target's own."""

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
        """Raise `CannotReplay`: there is nothing to attend to."""
        raise CannotReplay

    def _move(self, slot: int, source: list[int], target: list[int]) -> None: ...


class TargetStates:
    """The target's hidden states along texts: those stored in `folder` while the texts were written, or from one
    prefill of each. The latest are kept, up to `limit` bytes."""

    def __init__(self, target: Target, folder: Path | None = None, limit: int = 1 << 30) -> None:
        self._target, self._limit, self._held = target, limit, 0
        self._folder = folder if folder and folder.is_dir() else None
        self._kept: OrderedDict[tuple[Sequence[int], tuple[Tap, ...]], Mapping[Tap, Tensor]] = OrderedDict()

    def of(self, text: Sequence[int], taps: tuple[Tap, ...]) -> Mapping[Tap, Tensor]:
        """Return each tap at every token, [len(text), H]; stored ones lack the last two, which no drafter reads."""
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
        # No pass sees a text's last token, and no drafter the last pass.
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
                # A copy: a view would keep the rows that fill up the pass.
                parts[tap].append(out[tap][0, : len(chunk)].clone())
        return {tap: torch.cat(part) for tap, part in parts.items()}


def _bytes(states: Mapping[Tap, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in states.values())


class TextTarget:
    """A `Target` whose passes cost their price and return the hidden states of the recorded text.

    `slower`: how many times its price a verifying pass costs. `rows`: rows of all verifying passes so far. `between`:
    called in every verifying pass with its rows.
    """

    device = torch.device("cpu")

    def __init__(
        self, target: Target, states: TargetStates, prices: Prices, clock: VirtualClock, slower: float
    ) -> None:
        self.vocab_size, self.context_length, self._slower = target.vocab_size, target.context_length, slower
        self._fit, self._states, self._prices, self._clock = fit_of(target), states, prices, clock
        self._texts: dict[int, Sequence[int]] = {}
        self._seen: dict[int, Mapping[Tap, Tensor]] = {}
        self.rows = 0
        self.between: Callable[[int], object] = lambda rows: None

    def new_cache(self) -> TextCache:
        return TextCache(self._fit, self._prices.position_bytes)

    def hold(self, slot: int, text: Sequence[int]) -> None:
        """Take `text` for the slot's."""
        self._texts[slot] = text
        self._seen.pop(slot, None)

    def forward(self, rows: Rows, cache: KVCache[Any], want: Want) -> Forward:
        assert isinstance(cache, TextCache)
        count = sum(rows.counts)
        cache.note_pass(rows)
        if rows.prefill:
            self._clock.charge(self._prices.prefill(count, rows.lengths[0]))
        else:
            self._clock.charge(self._slower * self._prices.round(count, rows.lengths))
            self.rows += max(MIN_ROWS, count)
            self.between(count)
        return Forward(torch.empty(*rows.tokens.shape, 0), self._taps(rows, want.taps))

    def _taps(self, rows: Rows, taps: tuple[Tap, ...]) -> dict[Tap, Tensor]:
        """Return the taps [B, T, H] of a pass. Those of a row beside the text are never read: any will do."""
        found: dict[Tap, list[Tensor]] = {tap: [] for tap in taps}
        for slot, positions in zip(rows.slots, rows.positions, strict=True) if taps else ():
            if slot not in self._seen:
                self._seen[slot] = self._states.of(self._texts[slot], taps)
            for tap, states in self._seen[slot].items():
                found[tap].append(states[positions.clamp(max=len(states) - 1).to(states.device)])
        return {tap: torch.stack(parts) for tap, parts in found.items()}
