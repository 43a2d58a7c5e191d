"""Medusa heads: a few residual blocks per head, applied to one hidden state of the target (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.kernels.linear import linear
from paceline.models.heads import MedusaConfig
from paceline.models.weights import Weights
from paceline.protocols import EmbeddingAndHead, Target

MAP = "token_map"


class MedusaHeads:
    """All Medusa heads, in the target's dtype and on its device."""

    def __init__(self, config: MedusaConfig, tensors: Mapping[str, Tensor], target: Target) -> None:
        """Build the heads.

        Args:
            config: The heads' architecture.
            tensors: Weights, under the names in `heads.py`.
            target: The target, for its dtype and device, and its output head if the heads share it.

        Raises:
            CorruptModel: If a tensor is missing, unknown or has the wrong shape, or the heads do not fit the target.
            UnsupportedModel: If the target does not implement `EmbeddingAndHead`.
        """
        if not isinstance(target, EmbeddingAndHead):
            raise UnsupportedModel(
                f"{type(target).__name__} gives learned drafters no access to its embedding and head",
                "Implement paceline.protocols.EmbeddingAndHead in it, or use another drafter",
            )
        like = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
        if like.shape[-1] != config.hidden:
            raise CorruptModel(
                f"Medusa heads for hidden states of {config.hidden} do not fit a target of {like.shape[-1]}",
                "Use heads that were trained for this target",
            )
        weights = Weights(tensors, like.dtype, like.device)
        self._vocab = target.vocab_size
        self._blocks = [_block(config, weights, layer) for layer in range(config.layers)]
        self._ids: Tensor | None = None
        """The target's token id for each column of the heads. None if column t is token t in all heads."""
        self._outs: list[Callable[[Tensor], Tensor]] = [target.logits]
        """Functions that map states to logits: a single one for all heads, or one per head."""
        if not config.shared:
            self._own(config, tensors, weights)
        weights.skip(MAP)
        weights.finish()

    def _own(self, config: MedusaConfig, tensors: Mapping[str, Tensor], weights: Weights) -> None:
        """Load the output heads that belong to the Medusa heads, without columns outside the target's vocabulary."""
        names = [f"lm_heads.{head}.weight" for head in range(config.heads)]
        # vLLM's `original_lm_head` is a single output head for all Medusa heads.
        names = names if names[-1] in weights else names[:1]
        rows = len(tensors[names[0]]) if names[0] in weights else config.vocab_size
        every = torch.arange(self._vocab)
        ids = _map(tensors[MAP], rows, self._vocab) if MAP in weights else every[:rows]
        # vLLM's files may contain all rows. The map then selects some of them. Without a map, the last rows may be
        # padding.
        chosen = slice(rows) if len(ids) == rows else ids
        found = [weights.head(name, (rows, config.hidden))[chosen] for name in names]
        self._outs = [linear(weight).precise for weight in found]
        if not torch.equal(ids, every):
            self._ids = ids.to(weights.device)

    def states(self, x: Tensor, heads: int) -> Tensor:
        """Return the states [heads, R, H] of the first `heads` heads, given the target's "final" states x [R, H]."""
        x = x.expand(heads, -1, -1)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.baddbmm(bias[:heads], x, weight[:heads].mT))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [heads, R, V] for states [heads, R, H], in float32 (float64 for a float64 target).

        The logit is -inf for tokens that the heads cannot draft.
        """
        if len(self._outs) == 1:
            logits = self._outs[0](states)
        else:
            logits = torch.stack([out(x) for out, x in zip(self._outs, states, strict=False)])
        if self._ids is None:
            return logits
        return logits.new_full((*logits.shape[:2], self._vocab), -torch.inf).index_copy_(2, self._ids, logits)


def _block(config: MedusaConfig, weights: Weights, layer: int) -> tuple[Tensor, Tensor]:
    """Load one layer of all heads: weights [heads, H, H] and biases [heads, 1, H]. vLLM's blocks may have no biases."""
    names = [f"blocks.{head}.layers.{layer}" for head in range(config.heads)]
    weight = torch.stack([weights.get(name + ".weight", (config.hidden,) * 2) for name in names])
    none = weight.new_zeros(config.hidden)
    bias = [weights.get(n + ".bias", none.shape) if n + ".bias" in weights else none for n in names]
    return weight, torch.stack(bias)[:, None]


def _map(ids: Tensor, rows: int, vocab: int) -> Tensor:
    """Check that a token map fits the rows of the heads and the target's vocabulary."""
    fits = ids.ndim == 1 and len(ids) <= rows and 0 <= int(ids.min()) <= int(ids.max()) < vocab
    if not fits or (len(ids) < rows <= int(ids.max())):
        raise CorruptModel(
            f"the token_map {[*ids.shape]} does not fit Medusa heads of {rows} rows and a vocabulary of {vocab}",
            "Use heads that were trained for this target",
        )
    return ids.long().cpu()
