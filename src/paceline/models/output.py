"""Output heads of learned drafters."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import CorruptModel
from paceline.kernels.activations import Activation
from paceline.kernels.linear import linear
from paceline.models.weights import Weights
from paceline.protocols import TargetWithHead
from paceline.sampling.sampler import Subset

_HEAD = "lm_head.weight"


def output_head(
    weights: Weights, host: TargetWithHead, count: int, hidden: int, head_tokens: Tensor | None = None
) -> tuple[Subset | None, Activation]:
    """Build the output head of a learned drafter.

    It is the drafter's own `lm_head` for `count` tokens, which `d2t` lists. If the drafter has none, it is the target's
    head: the whole head, or its rows for these tokens.

    Args:
        weights: The drafter's tensors.
        host: The target.
        count: Number of tokens that the drafter scores.
        hidden: Size of the drafter's states.
        head_tokens: The token ids that a head for the whole vocabulary keeps, in ascending order. None for all tokens.

    Returns:
        The token ids that the head scores (None for all tokens in order), and a function that maps states [..., hidden]
        to logits in float32 or wider.

    Raises:
        CorruptModel: If the tokens are not in the target's vocabulary, or the target's head has another width.
    """
    weights.skip("t2d")
    if "d2t" in weights or count < host.vocab_size:
        head_tokens = None
    if _HEAD not in weights and "d2t" not in weights and head_tokens is None:
        return None, host.logits
    ids = torch.arange(count)
    if "d2t" in weights:
        ids += weights.get("d2t", (count,), torch.int64).cpu()
    if bool((ids < 0).any()) or len(ids.unique()) < count or ("d2t" in weights and int(ids.max()) >= host.vocab_size):
        raise CorruptModel(
            f"the head maps two rows to one token, or a row to an id beyond the {host.vocab_size} of the target",
            "Use a head that was trained for this target",
        )
    # Sort the ids, so that a tie goes to the lowest id. Without a map, rows beyond the vocabulary are padding.
    order = ids.argsort()[: host.vocab_size] if head_tokens is None else head_tokens
    ids = ids[order]
    subset = None if len(ids) == host.vocab_size else Subset(ids, host.vocab_size)
    if _HEAD in weights:
        return subset, linear(weights.head(_HEAD, (count, hidden))[order.to(weights.device)]).precise
    head = linear(weights.borrowed(_rows(host, hidden, ids), cut=head_tokens is not None))
    shaped, places = host.shaped, ids.to(host.device)
    return subset, lambda x: shaped(head.precise(x), places)


def _rows(host: TargetWithHead, hidden: int, ids: Tensor) -> Tensor:
    """Return the rows of the target's output head for these tokens."""
    head = host.head()
    if head.shape[1] != hidden:
        raise CorruptModel(
            f"the head has no {_HEAD}, and its width {hidden} is not its target's, {head.shape[1]}",
            "Fetch the head again",
        )
    return head[ids.to(head.device)]
