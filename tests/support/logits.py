"""Logits of the native decoder in chunks and in trees, and the reference logits to compare them with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.types import Draft, Want
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix
from tests.support.tiny_families import VOCAB
from tests.support.trees import path_to

CPU = torch.device("cpu")
TREE = Draft((7, 8, 9, 10, 11, 12, 7, 8), (0, 0, 1, 1, 2, 3, 4, 6))


def text(length: int) -> list[int]:
    """Return the first tokens of a fixed random text."""
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def feed(target: Decoder, cache: KVCache, slot: int, tokens: list[int]) -> torch.Tensor:
    """Run and commit a chunk. Return its logits [T, V]."""
    rows = pack_prefix(tokens, slot, cache.lengths[slot], CPU)
    out = target.forward(rows, cache, Want())
    cache.commit(rows, [range(1, len(tokens))])
    return out.logits[0, : len(tokens)]


def verify(target: Decoder, cache: KVCache, slot: int, last: int, draft: Draft) -> torch.Tensor:
    """Return the logits of the last token and of the draft's nodes, without committing the nodes."""
    rows = pack([last], [draft], [slot], [cache.lengths[slot]], CPU)
    return target.forward(rows, cache, Want()).logits[0]


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return logits [T, V] of a whole text without drafts, from a transformers model or a native decoder."""
    if isinstance(model, Decoder):
        return in_chunks(model, tokens, range(PREFILL_ROWS, len(tokens), PREFILL_ROWS))
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def in_chunks(target: Decoder, tokens: list[int], cuts: Sequence[int]) -> torch.Tensor:
    """Return logits [T, V] of a text in chunks that end at `cuts` and at its end."""
    cache = target.new_cache()
    slot = cache.acquire(len(tokens))
    return torch.cat([feed(target, cache, slot, tokens[a:b]) for a, b in itertools.pairwise((0, *cuts, len(tokens)))])


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of `theirs`."""
    return float((ours - theirs).norm() / theirs.norm())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that logits are equal up to rounding."""
    # transformers' norms (Gemma 2's softmax, the states of hybrids) are in float32 even here.
    assert relative_error(ours, theirs) < 3e-5


def chunks_and_tokens(target: Decoder, tokens: list[int], cuts: Sequence[int]) -> torch.Tensor:
    """Return logits [T, V] of a text in chunks that end at `cuts`, then token by token."""
    cache = target.new_cache()
    slot = cache.acquire(len(tokens))
    logits = [feed(target, cache, slot, tokens[a:b]) for a, b in itertools.pairwise((0, *cuts))]
    for token in tokens[cuts[-1] :]:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], CPU)
        logits.append(target.forward(rows, cache, Want()).logits[0, :1])
        cache.commit(rows, [()])
    return torch.cat(logits)


def check_chunks(theirs: Any, ours: Decoder, length: int, cuts: Sequence[int]) -> None:
    """Check that logits in chunks that end at `cuts`, and then token by token, equal transformers' logits."""
    tokens = text(length)
    assert_close(chunks_and_tokens(ours, tokens, cuts), expected(theirs, tokens))


def check_drafts(
    theirs: Any, ours: Decoder, cache: KVCache, slot: int, tokens: list[int], rows: tuple[int, ...]
) -> None:
    """Check these nodes of a tree, then a chain after a committed branch of the tree.

    Args:
        theirs: Model with the reference logits: transformers' model, or `ours`.
    """
    whole = pack([5], [TREE], [slot], [cache.lengths[slot]], CPU)
    logits = ours.forward(whole, cache, Want()).logits[0]
    for row in rows:
        path = path_to(TREE, row)[::-1]
        assert_close(logits[row], expected(theirs, [*tokens, 5, *(TREE.tokens[r - 1] for r in path[1:])])[-1])
    path = path_to(TREE, 8)[::-1][1:]
    cache.commit(whole, [path])
    tokens = [*tokens, 5, *(TREE.tokens[r - 1] for r in path)]
    logits = verify(ours, cache, slot, 6, Draft.chain([1, 2, 3, 4, 5]))
    assert_close(logits[:6], expected(theirs, [*tokens, 6, 1, 2, 3, 4, 5])[-6:])


def check_path(theirs: Any, ours: Decoder, length: int) -> None:
    """Check drafts after a text with this number of tokens, in one chunk."""
    tokens, cache = text(length), ours.new_cache()
    slot = cache.acquire(length)
    feed(ours, cache, slot, tokens)
    check_drafts(theirs, ours, cache, slot, tokens, rows=(2, 5, 7, 8))


def check_ring(theirs: Any, ours: Decoder) -> None:
    """Check logits and drafts after the ring buffer of a sliding-window layer has wrapped."""
    tokens, cache = text(1110), ours.new_cache()
    slot = cache.acquire()
    parts = [feed(ours, cache, slot, tokens[start : start + PREFILL_ROWS]) for start in range(0, 1110, PREFILL_ROWS)]
    assert_close(torch.cat(parts), expected(theirs, tokens))
    check_drafts(theirs, ours, cache, slot, tokens, rows=(8,))
