"""Early exit: the target's first layers draft, and verification continues from the layer where they stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, TreeDrafter, TreeGrowth, logits_of
from paceline.drafters.hosted import CacheSharing
from paceline.errors import InvalidOption, UnsupportedModel
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.models.norms import RMSNorm
from paceline.models.weights import Weights
from paceline.protocols import Target
from paceline.sampling.sampler import Ranked
from paceline.types import Carried, Draft, DraftBudget, Tap, Verdict, Want
from paceline.verify.tree import pack


class EarlyExit(CacheSharing, TreeDrafter):
    """Drafts with the target's first E = `config.layers` layers and its head, over the target's own cache.

    Verification uses the keys and values that drafting has written. For a row that drafting has fed, verification
    begins at layer E, so no row passes a layer twice, and there is no backlog. Every fed row must stay in the draft.
    Therefore, a tree keeps the best `branch` nodes of each level first, and then the best of the other nodes.

    A chain ends, and a node of a tree becomes a leaf, if the exit's highest probability is below `threshold`. With the
    rules `rejection` and `block`, trees keep their shape, because it must not depend on the draws.

    Source: LayerSkip, arXiv 2404.16710 (shared cache); Draft & Verify, arXiv 2309.08168, and Kangaroo, arXiv
    2404.18911 (when to stop; a trained projection before the head).
    """

    draft = DraftBudget.chain(5)

    def __init__(
        self, config: ExitConfig, tensors: Mapping[str, Tensor], target: Target, threshold: float = 0.5
    ) -> None:
        """Make a drafter.

        Args:
            config: Number of layers, and sizes of a trained exit.
            tensors: Weights of a trained exit (see `models/heads.py`). If empty, the target's final norm and head
                follow layer E.
            target: The target. It must be a model that Paceline runs itself.
            threshold: Drafting stops where the exit's highest probability is below this number, 0 to 1.

        Raises:
            UnsupportedModel: If the target cannot stop after some of its layers.
            InvalidOption: If the number of layers or the threshold is out of range.
            CorruptModel: If tensors are missing or have the wrong shape.
        """
        if not isinstance(target, Decoder):
            raise UnsupportedModel(
                f"{type(target).__name__} cannot stop after its first layers, which early exit needs",
                "Use early exit with a model that Paceline runs itself, or another drafter",
            )
        self._target, self._exit, self.threshold = target, config.layers, threshold
        layers, hidden = target.config.layers, target.config.hidden
        if not 1 <= config.layers <= layers:
            raise InvalidOption(
                f"early exit after {config.layers} layers is not possible", f"Use 1 to {layers} layers for this target"
            )
        if not 0.0 <= threshold <= 1.0:
            raise InvalidOption(
                f"threshold={threshold} is not a probability", "Use a number from 0 (never stop early) to 1"
            )
        weights = Weights(tensors, target.dtype, target.device)
        self._norm, self._projection = target.norm, None
        if "norm.weight" in weights:
            self._norm = RMSNorm(weights.get("norm.weight", (hidden,)), target.config.norms.eps)
        if rank := config.rank:
            self._projection = weights.linear({"proj.down": rank}, hidden), weights.linear({"proj.up": hidden}, rank)
        weights.finish()
        self._streams: dict[int, list[Tensor]] = {}
        """Slot -> outputs of the exit layer in this round, one tensor per pass."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None: ...

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None: ...

    def release(self, slot: int) -> None:
        self._streams.pop(slot, None)

    def limit(self, ask: Ask) -> DraftBudget:
        """Limit the depth, so that the draft has room for all fed nodes (up to `branch` per level)."""
        # An interrupted round may have left streams here.
        self._streams[ask.slot] = []
        return ask.budget.within(ask.budget.nodes // ask.budget.branch + 1)

    def roots(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        for growth in growths:
            growth.row_of = {ROOT: 0}
        return self._feed(growths, [0] * len(growths))

    def level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        for growth in growths:
            # Fed rows come first in the draft, and drawn siblings must stay in order. So siblings that were drawn
            # before a fed node are fed as well. This costs nothing, because verification then skips these layers.
            growth.chosen = growth.nodes.with_older_siblings(growth.chosen)
        return self._feed(growths, [growth.feed() for growth in growths])

    def _feed(self, growths: Sequence[TreeGrowth], starts: Sequence[int]) -> list[Tensor]:
        """Run rows `starts[i]` and later of each tree i through the first layers. Return logits [rows, V] per tree."""
        asks = [growth.ask for growth in growths]
        drafts = [Draft(tuple(g.nodes.tokens[node] for node in g.fed_nodes), tuple(g.parent_rows)) for g in growths]
        rows = pack(
            [ask.last for ask in asks],
            drafts,
            [ask.slot for ask in asks],
            [ask.position for ask in asks],
            self._target.device,
            starts,
        )
        want = Want("none", taps=(self._exit,), layers=self._exit)
        streams = self._target.forward(rows, self.target_cache, want).taps[self._exit]
        for ask, stream, count in zip(asks, streams, rows.counts, strict=True):
            self._streams[ask.slot].append(stream[:count])
        return logits_of(streams, rows.counts, self._logits)

    @torch.inference_mode()
    def _logits(self, streams: Tensor) -> Tensor:
        """Return the exit's logits [..., V] of streams [..., H]."""
        if self._projection:
            down, up = self._projection
            streams = up.onto(down(streams), streams)
        return self._target.logits(self._norm(streams))

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        ranked = [Ranked([], [])] * len(paths)
        sure = [i for i, stops in enumerate(self._stops(growth, logits)) if not stops]
        best = super().rank(growth, logits[sure], [paths[i] for i in sure], count)
        for i, candidates in zip(sure, best, strict=True):
            ranked[i] = candidates
        return ranked

    def _stops(self, growth: TreeGrowth, logits: Tensor) -> list[bool]:
        """Return True for each row of logits [R, V] at which drafting stops."""
        # Earlier draws may decide where a chain stops, because each of its rows is verified only with the token that
        # was drawn from it. They must not decide the shape of a tree.
        if growth.ask.draws and growth.nodes.budget.branch > 1:
            return [False] * len(logits)
        confidence = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        return (confidence < self.threshold).tolist()

    def finished_draft(self, growth: TreeGrowth) -> Draft:
        streams = self._streams.pop(growth.ask.slot, [])
        if not streams:
            return Draft()
        return replace(growth.nodes.draft(growth.fed_nodes), carried=Carried(self._exit, torch.cat(streams)))
