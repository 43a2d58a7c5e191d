"""Gemma 4's assistant: a few layers that draft over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.cache.slab import SlabCache
from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, Growing, Growth, logits_of
from paceline.errors import InvalidOption, UnsupportedModel
from paceline.kernels.linear import free_rows
from paceline.models.assistant import AssistantNetwork
from paceline.models.decoder import Decoder
from paceline.models.heads import AssistantConfig
from paceline.protocols import KVCache, Target
from paceline.types import DraftBudget, Tap, Verdict
from paceline.verify.tree import MIN_ROWS


@dataclass(slots=True)
class _AssistantSlot:
    """`state` [target H]: the target's normed state before the pending token. `after`: the same as the assistant
    imagines it, after the pending token (`ROOT`) and after each node of this round that has been fed."""

    state: Tensor
    after: dict[int, Tensor] = field(default_factory=dict)


class Assistant(Growing):
    """Drafts with a Gemma 4 assistant, beside the target that it was trained for.

    A row is made of a token and the state before it, and sees the text that the target has committed, whatever its
    depth: all rows of a round stand at the position of the pending token, as in training. So the assistant has no
    cache, nothing to catch up with, and nothing that a rejected draft could spoil.

    Source: Google's Gemma 4 assistants, as in transformers (`SinglePositionMultiTokenCandidateGenerator`).
    """

    replayable = False
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, config: AssistantConfig, tensors: Mapping[str, Tensor], target: Target) -> None:
        """`tensors`: under the names of `models/heads.py`. Raises `CorruptModel`, and `UnsupportedModel` for a target
        whose keys and values it cannot see."""
        if not isinstance(target, Decoder):
            raise UnsupportedModel(
                f"{type(target).__name__} does not share its keys and values, as an assistant needs",
                "Use it with a Gemma 4 that Paceline runs itself, or another drafter",
            )
        self.draft = DraftBudget(24, 6, 4) if free_rows(target.device) > 24 else DraftBudget.chain(3)
        self._net, self._device = AssistantNetwork(config, tensors, target), target.device
        self._texts: dict[int, _AssistantSlot] = {}
        self._bound: Callable[[], KVCache | None] = lambda: None

    @property
    def needs_past(self) -> bool:
        """False: it needs only the last token's state, which is always fed."""
        return False

    def bind(self, cache: KVCache) -> None:
        """Draft over this cache. Raises `InvalidOption` where the drafter serves another engine that is in use."""
        if self._bound() not in (None, cache):
            raise InvalidOption("an assistant cannot serve two models at once", "Make one for each")
        self._bound = ref(cache)

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._texts.pop(slot, None)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self.admit(slot, prompt)
        if source in self._texts:
            self._texts[slot] = _AssistantSlot(self._texts[source].state)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, taps, -1)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, out, verdict.path[-1] if verdict.path else 0)

    def _receive(self, slot: int, taps: Mapping[Tap, Tensor], row: int) -> None:
        # A copy: a view would keep the states of the whole pass, or follow a buffer that is used again.
        self._texts[slot] = _AssistantSlot(taps["final"][row].clone())

    def release(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def limit(self, ask: Ask) -> DraftBudget:
        """Return an empty budget before the first token: there is no state yet."""
        return ask.budget if ask.slot in self._texts and ask.position else DraftBudget.chain(0)

    def roots(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        return self._step(growths, [[growth.ask.last] for growth in growths])

    def level(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        return self._step(growths, [[growth.nodes.tokens[node] for node in growth.chosen] for growth in growths])

    @torch.inference_mode()
    def _step(self, growths: Sequence[Growth], tokens: Sequence[list[int]]) -> Sequence[Tensor]:
        """Feed each tree's chosen nodes, of which these are the tokens."""
        cache = self._bound()
        if not isinstance(cache, SlabCache):
            raise InvalidOption("the assistant has no target cache", "Bind the cache that holds the slots")
        texts = [self._texts[growth.ask.slot] for growth in growths]
        counts, room = [len(line) for line in tokens], max(-(-MIN_ROWS // len(growths)), *map(len, tokens))
        before = [
            torch.stack([_before(text, growth, n) for n in growth.chosen])
            for text, growth in zip(texts, growths, strict=True)
        ]
        hidden = pad_sequence([torch.cat([x, x[:1].expand(room - len(x), -1)]) for x in before], batch_first=True)
        rows = torch.tensor([[*line, *line[:1] * (room - len(line))] for line in tokens], device=self._device)
        states, after = self._net.step(rows, hidden, cache, [growth.ask.slot for growth in growths])
        for text, growth, line in zip(texts, growths, after, strict=True):
            text.after |= dict(zip(growth.chosen, line, strict=False))
        return logits_of(states, counts, self._net.logits)


def _before(text: _AssistantSlot, growth: Growth, node: int) -> Tensor:
    """The state [target H] before a node's token."""
    return text.state if node == ROOT else text.after[growth.nodes.parents[node]]
