"""A drafter for tests, and the checks that every drafter must pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.stack import DrafterWrapper
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.protocols import Saved, Target
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing.probe import fill
from paceline.testing.tiny import run, run_together, start, tiny_target
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import check, depths


class Oracle(Drafter):
    """A drafter that knows the whole text in advance and errs at a chosen rate, to test with any acceptance rate.

    At every node, the true next token is among the children with probability `accuracy`; the other children are random.
    With accuracy 0 every draft is wrong.

    Args:
        text: Token ids of the prompt and the whole reply.
        accuracy: Probability from 0 to 1 that a node has the true next token among its children.
        vocab_size: Size of the target's vocabulary.
        seed: Seed of the random children.
    """

    def __init__(self, text: Sequence[int], accuracy: float, vocab_size: int, seed: int = 0) -> None:
        self._text, self._accuracy, self._vocab = list(text), accuracy, vocab_size
        self._random = random.Random(seed)

    def admit(self, slot: int, prompt: Sequence[int]) -> None: ...

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None: ...

    def release(self, slot: int) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [fill(ask.budget, partial(self._children, ask)) for ask in asks]

    def _children(self, ask: Ask, row: int, depth: int) -> list[int]:
        position, branch = ask.position + 1 + depth, ask.budget.branch
        true = self._text[position] if position < len(self._text) else 0
        wrong = [t for t in self._random.sample(range(self._vocab), min(branch + 1, self._vocab)) if t != true]
        if self._random.random() < self._accuracy:
            wrong[self._random.randrange(branch)] = true
        return wrong[:branch]


def check_drafter(make: Callable[[], Drafter], target: Target | None = None) -> None:
    """Check the contract of `Drafter` on a toy target.

    - The text is the same with the drafter as without it, greedy and sampled, for one request and for a batch.
    - Drafts are trees within their budget, and their tokens have a positive probability in q, if a draft has q.
    - Slots do not affect each other, and a request may end at any time.

    Args:
        make: Function that makes a new drafter for `target`.
        target: The target; None for a random decoder with a vocabulary of 37 tokens.

    Raises:
        AssertionError: The drafter breaks the contract. The message says how.
    """
    target = target or tiny_target()
    prompt = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
    samplings = [Sampling(max_new_tokens=32, temperature=temperature, seed=7) for temperature in (0.0, 0.9)]
    texts = [run(target, prompt, sampling)[0] for sampling in samplings]
    for shape in (DraftBudget.chain(1), DraftBudget.chain(6), DraftBudget(10, 4, 3)):
        for sampling, plain in zip(samplings, texts, strict=True):
            watched = _Checked(make())
            engine = Engine(target, watched, shape)
            assert run(target, prompt, sampling, engine=engine)[0] == plain, "the text depends on the drafter"
            assert run(target, prompt, sampling, engine=engine)[0] == plain, "a slot keeps state after release"
        run(target, prompt, Sampling(max_new_tokens=32, temperature=0.9, seed=7, rule="block"), engine=engine)
    _check_batch(make(), target, prompt)
    _check_forks(make(), target, prompt)
    _check_requests(make(), target, prompt)
    _check_saved(make(), target, prompt)


def _check_batch(drafter: Drafter, target: Target, prompt: Sequence[int]) -> None:
    """Check that different requests in one batch each write the same text as on their own."""
    prompts = [prompt, prompt[3:], [2, *prompt[::-1]]]
    samplings = [
        Sampling(max_new_tokens=24),
        Sampling(max_new_tokens=12, temperature=0.8, top_k=9, seed=3),
        Sampling(max_new_tokens=18, temperature=1.1, top_p=0.9, seed=4, processors=[_no_repeat]),
    ]
    plain = [run(target, *one)[0] for one in zip(prompts, samplings, strict=True)]
    watched = _Checked(drafter)
    together = [
        tokens for tokens, _, _ in run_together(Engine(target, watched, DraftBudget(8, 4, 2)), prompts, samplings)
    ]
    if watched.error:  # the scheduler caught it and repeated the round for each request separately
        raise watched.error
    assert together == plain, "requests in one batch change each other's text"


def _check_forks(drafter: Drafter, target: Target, prompt: Sequence[int]) -> None:
    """Check that a fork gets the same drafts as its source, although its prompt is not fed again."""
    engine = Engine(target, drafter, DraftBudget.chain(4))
    sampling = Sampling(max_new_tokens=8, temperature=0.9, seed=7)
    request = _begin(engine, sampling, prompt)
    requests = [request, _begin(engine, sampling, prompt, source=request)]
    first, second = drafter.propose([_ask(engine, r) for r in requests])
    assert first == second, "a fork and its source get different drafts"
    for request in requests:
        engine.finish(request)


def _check_saved(drafter: Drafter, target: Target, prompt: Sequence[int]) -> None:
    """Check that a prompt with a cached prefix gets the same drafts as a fully fed prompt
    (`engine/prefix_cache.py`)."""
    engine = Engine(target, drafter, DraftBudget.chain(4))
    sampling = Sampling(temperature=0.9, seed=7)
    plain = _begin(engine, sampling, prompt)
    expected = drafter.propose([_ask(engine, plain)])
    for length in (len(prompt) - 2, 2):
        other = _begin(engine, sampling, [*prompt[: length + 1], *prompt[3::-1]])
        for _ in range(2):
            text, saved = engine.cache.save(other.slot), drafter.save(other.slot)
            engine.step([other])
            unknown = drafter.needs_past and (saved is None or not saved.holds(length, len(prompt)))
            if unknown or not text.holds(length, len(prompt)):
                continue
            request = _begin(engine, sampling, prompt, saved=(text, saved, length))
            assert drafter.propose([_ask(engine, request)]) == expected, (
                f"a prompt with {length} loaded tokens and a fully fed prompt get different drafts"
            )
            engine.finish(request)
        engine.finish(other)
    engine.finish(plain)


def _no_repeat(prefix: Prefix, logits: Tensor) -> Tensor:
    """Forbid repeating the last token: a processor that depends on the prefix."""
    logits[prefix.tokens[-1]] = -torch.inf
    return logits


def _check_requests(drafter: Drafter, target: Target, prompt: Sequence[int]) -> None:
    """Check that slots can be used in any order, and that releasing an unknown slot does nothing."""
    engine = Engine(target, drafter, DraftBudget.chain(4))
    drafter.release(5)
    first = _begin(engine, Sampling(), prompt)
    alone = drafter.propose([_ask(engine, first)])
    second = _begin(engine, Sampling(), [*prompt[-2::-1], prompt[-1]])
    both = drafter.propose([_ask(engine, first), _ask(engine, second)])
    assert both[0] == alone[0], "another slot, or a second call of propose, changes a draft"
    engine.finish(second)
    drafter.release(second.slot)
    assert drafter.propose([_ask(engine, first)]) == alone, "releasing one slot changes another slot's draft"
    assert drafter.propose([_ask(engine, first, DraftBudget.chain(0))]) == [Draft()], "a budget of 0 must give Draft()"
    engine.finish(first)


def _begin(
    engine: Engine,
    sampling: Sampling,
    prompt: Sequence[int],
    source: Request | None = None,
    saved: tuple[Saved, Saved | None, int] | None = None,
) -> Request:
    """Return a prefilled request. `saved` holds the states of target and drafter, and the number of tokens to load."""
    request = start(engine, prompt, sampling, (), source)
    if saved and request.policy:
        text, states, length = saved
        engine.cache.load(request.slot, text, length)
        if states:
            request.policy.drafter.load(request.slot, states, length)
    engine.prefill(request)
    return request


def _ask(engine: Engine, request: Request, budget: DraftBudget | None = None) -> Ask:
    return Ask(request.slot, request.prefix, budget or DraftBudget.chain(4), request.sampler)


class _Checked(DrafterWrapper):
    """A drafter wrapper that checks every draft and keeps the first error."""

    error: Exception | None = None

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        try:
            drafts = super().propose(asks)
            _check_drafts(asks, drafts)
        except Exception as error:
            self.error = self.error or error
            raise
        return drafts


def _check_drafts(asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
    assert len(drafts) == len(asks), "propose must return one draft per ask"
    for ask, draft in zip(asks, drafts, strict=True):
        check(draft)
        assert len(draft.tokens) <= ask.budget.nodes, "a draft exceeds the nodes of its budget"
        assert max(depths(draft.parents)) <= ask.budget.depth, "a draft is deeper than its budget"
        children = Counter(draft.parents)
        assert max(children.values(), default=0) <= ask.budget.branch, "a draft exceeds the branches of its budget"
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            assert parent not in draft.q or draft.q[parent][token] > 0, "a drafted token has probability 0 in its q"
