"""Replies without a drafter, computed once per process. Tests compare drafted replies with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from paceline.protocols import Target
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.types import FinishReason


@cache
def _reply(
    target: Target, prompt: tuple[int, ...], sampling: Sampling, eos: tuple[int, ...]
) -> tuple[list[int], FinishReason | None]:
    return run(target, prompt, sampling, eos=eos)[:2]


def plain_reply(
    target: Target, prompt: Sequence[int], sampling: Sampling, eos: Sequence[int] = ()
) -> tuple[list[int], FinishReason | None]:
    """Return the token ids of a reply and its stop reason. Do not use it for patched targets or samplers."""
    tokens, finish = _reply(target, tuple(prompt), sampling, tuple(eos))
    return list(tokens), finish


def plain_text(target: Target, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Return the token ids of a reply."""
    return plain_reply(target, prompt, sampling)[0]
