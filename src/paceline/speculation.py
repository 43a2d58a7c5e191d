"""Speculative decoding with two sessions: the complete loop, for your own draft model and target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from paceline.engine.detokenizer import Chunk, TextStream
from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling, Vocabulary, changed
from paceline.sampling.sampler import Prefix, Sampler
from paceline.session import Session
from paceline.types import Draft, Prompt
from paceline.verify.rules import RULES


def speculate(
    target: Session,
    drafter: Session,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    length: int = 4,
    **changes: Any,
) -> Iterator[list[Chunk]]:
    """Generate a reply with the target's session, using drafts from the drafter's session.

    The reply is the same as the reply of the target's `LLM.generate` with the same sampling parameters. Both sessions
    are reset first, and contain the text afterwards. The models must share a vocabulary. Tokens that only the drafter
    has are never drafted. Source of the method: Leviathan et al., arXiv 2211.17192.

    Args:
        target: Session of the target.
        drafter: Session of the draft model.
        prompt: The prompt.
        sampling: Sampling parameters. The default is greedy decoding.
        length: Number of tokens to draft per round.
        **changes: Individual sampling parameters, such as `temperature=0.7`. They override `sampling`.

    Yields:
        The chunks of each round.

    Raises:
        PacelineError: If the prompt or an option is invalid.
    """
    sampling = changed(sampling or Sampling(), changes).seeded()
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InvalidOption(f"length must be a whole number >= 1, got {length!r}", "Use 4, for example")
    if sampling.grammar or sampling.prediction:
        raise InvalidOption("speculate() does not support grammars and predictions", "Use LLM.generate")
    vocabulary = Vocabulary(target.vocab_size, target.eos_token_ids, partial(target.encode, raw=True))
    sampler = sampling.sampler(vocabulary=vocabulary)
    tokens = target.encode(prompt)
    target.reset()
    drafter.reset()
    target.observe(tokens)
    stream = TextStream(sampling, target.eos_token_ids, target.decode, target.context_length - len(tokens))
    return _rounds(target, drafter, sampler, stream, length)


def _rounds(
    target: Session, drafter: Session, sampler: Sampler, stream: TextStream, length: int
) -> Iterator[list[Chunk]]:
    text, ended = target.history, not stream.left
    prompt = shared = len(text)
    while not ended:
        prefix = Prefix(text, (), prompt)
        draft = _draft(drafter, shared, prefix, sampler, min(length, stream.left - 1), target.vocab_size)
        logits = target.logits_after(draft.tokens)
        verdict = stream.trim(RULES[sampler.rule](draft, logits, sampler, prefix), draft, logits)
        target.observe(verdict.tokens)
        text += verdict.tokens
        shared, ended = len(text) - len(verdict.tokens) + len(verdict.path), bool(verdict.finish)
        yield stream.emit(verdict)


def _draft(drafter: Session, shared: int, prefix: Prefix, sampler: Sampler, length: int, vocab_size: int) -> Draft:
    """Draft up to `length` tokens. The drafter's session keeps at most the first `shared` tokens of the text, and reads
    the rest."""
    text = prefix.token_ids
    path: list[int] = []
    q: dict[int, Tensor] = {}
    drafter.rollback_to(min(shared, len(drafter.history)))
    length = min(length, drafter.context_length - len(text))
    if length > 0:
        drafter.observe(text[len(drafter.history) :])
    for row in range(length):
        ranked = sampler.rank(prefix, _fitted(drafter.next_logits(), vocab_size)[None], [path], 1)[0]
        if not ranked.tokens:
            break
        if ranked.q is not None:
            q[row] = ranked.q
        path.append(ranked.tokens[0])
        if row + 1 < length:
            drafter.observe(path[-1:])
    return Draft(tuple(path), tuple(range(len(path))), q)


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits [V'] to the target's vocabulary [V]."""
    return pad(logits, (0, vocab_size - len(logits)), value=-math.inf)
