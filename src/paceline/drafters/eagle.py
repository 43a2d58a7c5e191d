"""EAGLE: a one-layer head that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.drafters.base import Ask
from paceline.drafters.cached import CachedSlot, StateDrafter
from paceline.drafters.growth import (
    TreeDrafter,
    TreeGrowth,
    head_budget,
    logits_of,
    pack_level,
    without_drawn_siblings,
)
from paceline.drafters.model import MAX_SHARED_PASS
from paceline.models.eagle import EagleNetwork
from paceline.models.heads import EagleConfig
from paceline.protocols import TargetWithHead
from paceline.sampling.sampler import Ranked
from paceline.types import Draft, DraftBudget, Tap
from paceline.verify.tree import PREFILL_ROWS, pack


@dataclass(slots=True)
class _EagleSlot(CachedSlot):
    """One request. The cache holds one row for each position whose features have been read.

    Attributes:
        root: Both results [H] of `EagleNetwork.step` for the newest row in the cache. None before the first row.
        grown: Hidden states [1 + rows, H] of this round: the root's, followed by the rows of `pack_level`.
    """

    root: tuple[Tensor, Tensor] | None = None
    grown: Tensor | None = None


class Eagle(StateDrafter[_EagleSlot], TreeDrafter):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 head for the target that it was trained for.

    The head reads features: the target's hidden states at its taps. Features stay pending until the next `propose`. The
    first pass of that call reads them for all requests, in place of the features that the head itself predicted for
    drafted tokens. Row i of the head's cache is made from the features at position i and token i + 1. A text of one
    token has no features yet, so its first round has no draft.
    """

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], target: TargetWithHead) -> None:
        """Make a drafter.

        Args:
            config: Sizes of the head.
            tensors: Weights, under the names of `models/heads.py`.
            target: The target that the head was trained for.

        Raises:
            CorruptModel: If tensors are missing or have the wrong shape.
        """
        self.taps: tuple[Tap, ...] = config.taps
        self.draft = head_budget(target.device)
        self._net, self._device = EagleNetwork(config, tensors, target), target.device
        super().__init__(self._net.new_cache(), _EagleSlot)

    def limit(self, ask: Ask) -> DraftBudget:
        """Return the ask's budget, or an empty budget if the text has no features yet (a text of one token, or a text
        that was not fed)."""
        state = self._slots[ask.slot]
        known = self._cache.lengths[state.cache_slot] + len(state.pending)
        return without_drawn_siblings(ask) if 0 < known == len(state.token_ids) - 1 else DraftBudget.chain(0)

    @torch.inference_mode()
    def roots(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        for state in states:
            while len(state.pending) > MAX_SHARED_PASS:
                self._read_pending(state)
        # If `propose` is called again before `observe`, a request has no pending features.
        if behind := [state for state in states if len(state.pending)]:
            self._read(behind, [len(state.pending) for state in behind])
        roots = [state.root for state in states if state.root is not None]
        for state, (hidden, _) in zip(states, roots, strict=True):
            state.grown = hidden[None]
        return logits_of(torch.stack([out[None] for _, out in roots]), [1] * len(roots), self._net.logits)

    def _read_pending(self, state: _EagleSlot) -> None:
        """Read pending features of one request in a separate pass. At least one feature stays pending for the root."""
        self._read([state], [min(PREFILL_ROWS, len(state.pending) - 1)], prefill=True)

    def _read(self, states: Sequence[_EagleSlot], counts: Sequence[int], prefill: bool = False) -> None:
        """Read the first `counts[i]` pending features of each request i in one pass. Each feature is read with the
        token after it."""
        slots = [state.cache_slot for state in states]
        starts = [self._cache.lengths[slot] for slot in slots]
        texts = [s.token_ids[start + 1 :][:n] for s, start, n in zip(states, starts, counts, strict=True)]
        rows = pack([text[0] for text in texts], [Draft.chain(text[1:]) for text in texts], slots, starts, self._device)
        features = pad_sequence([s.pending.take(n) for s, n in zip(states, counts, strict=True)], batch_first=True)
        # Padding rows have no features.
        features = F.pad(features, (0, 0, 0, rows.tokens.shape[1] - features.shape[1]))
        images = [
            s.images.given(start + 1, start + 1 + n) if s.images else None
            for s, start, n in zip(states, starts, counts, strict=True)
        ]
        hidden, outs = self._net.step(replace(rows, prefill=prefill), self._net.fuse(features), self._cache, images)
        self._cache.commit(rows, [range(1, count) for count in counts])
        for i, (state, count) in enumerate(zip(states, counts, strict=True)):
            state.root = hidden[i, count - 1], outs[i, count - 1]

    @torch.inference_mode()
    def level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        slots = [state.cache_slot for state in states]
        rows = pack_level(growths, slots, [self._cache.lengths[slot] for slot in slots], self._device)
        grown = [state.grown for state in states if state.grown is not None]
        # The root's hidden state comes first, so the state of row r is at r + 1, and the state of `NONE` is at 0.
        lines = [line[start:] for line, start in zip(rows.parents, rows.starts, strict=True)]
        above = torch.tensor(lines, device=self._device) + 1
        hidden = pad_sequence(grown, batch_first=True).take_along_dim(above[:, :, None], 1)
        hidden, outs = self._net.step(rows, hidden, self._cache)
        for state, before, new, growth in zip(states, grown, hidden, growths, strict=True):
            state.grown = torch.cat([before, new[: len(growth.chosen)]])
        return logits_of(outs, rows.counts, self._net.logits)

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """Rank by the target's token ids, because the noise is a function of them."""
        return growth.ask.rank(logits, paths, count, self._net.subset)
