"""Where the tokens of a learned drafter come out."""

from __future__ import annotations

import torch

from paceline.errors import CorruptModel
from paceline.models.weights import Weights
from paceline.protocols import Host
from paceline.runner import Activation, linear
from paceline.sampler import Subset


def output_head(weights: Weights, host: Host, count: int, hidden: int) -> tuple[Subset | None, Activation]:
    """Which of the target's tokens a head's logits are of (None: all of them, in order), and what makes them of states
    [..., hidden]: an `lm_head` of its own over `count` tokens, which `d2t` names, or the target's.

    Raises `CorruptModel` where the tokens are not the target's.
    """
    weights.skip("t2d")
    if "lm_head.weight" not in weights:
        return None, host.logits
    ids = torch.arange(count)
    if "d2t" in weights:
        ids += weights.get("d2t", (count,), torch.int64).cpu()
    if bool((ids < 0).any()) or len(ids.unique()) < count or ("d2t" in weights and int(ids.max()) >= host.vocab_size):
        raise CorruptModel(
            f"the head names tokens beyond the {host.vocab_size} of the target, or one of them twice",
            "It was made for another model",
        )
    # Ascending, so that ties go to the lowest id; without a map, rows beyond the vocabulary are padding.
    order = ids.argsort()[: host.vocab_size]
    weight = weights.get("lm_head.weight", (count, hidden))
    if len(order) < count or not torch.equal(order, torch.arange(count)):
        weight = weight[order.to(weight.device)]
    ids = ids[order]
    return None if len(ids) == host.vocab_size else Subset(ids, host.vocab_size), linear(weight)
