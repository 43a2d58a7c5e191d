"""Toy targets and drafters, for tests of your own: small enough to compare token by token, real enough to fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.engine import Engine
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.protocols import Ask, Drafter, Target
from paceline.sampling import Sampling
from paceline.stats import Stats
from paceline.stream import TextStream
from paceline.tree import check, depths
from paceline.types import Draft, FinishReason, Tap, Tree, Verdict

TINY = ModelConfig(
    family="llama",
    vocab_size=37,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    context_length=256,
    tied=True,
)


def random_tensors(config: ModelConfig, seed: int = 0, scale: float = 0.4) -> dict[str, Tensor]:
    """Normal weights for `config` by Hugging Face name, float32, norms at one."""
    generator = torch.Generator().manual_seed(seed)
    width, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden)}
    for i in range(config.layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {attn + "q_proj.weight": (width, config.hidden), attn + "o_proj.weight": (config.hidden, width)}
        shapes |= {attn + f"{x}_proj.weight": (kv, config.hidden) for x in "kv"}
        shapes |= {mlp + f"{x}_proj.weight": (config.ffn, config.hidden) for x in ("gate", "up")}
        shapes |= {mlp + "down_proj.weight": (config.hidden, config.ffn)}
    if not config.tied:
        shapes |= {"lm_head.weight": (config.vocab_size, config.hidden)}
    tensors = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    norms = ["model.norm"] + [
        f"model.layers.{i}.{n}_layernorm" for i in range(config.layers) for n in ("input", "post_attention")
    ]
    return tensors | {name + ".weight": torch.ones(config.hidden) for name in norms}


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: int | bool) -> Decoder:
    """A random decoder of a few thousand weights, float64 so that rounding decides nothing."""
    config = replace(TINY, **changes)  # type: ignore[arg-type]
    return Decoder(config, random_tensors(config, seed), dtype, torch.device("cpu"))


def run(
    target: Target,
    prompt: Sequence[int],
    sampling: Sampling,
    drafter: Drafter | None = None,
    draft: Tree | None = None,
    *,
    eos: Sequence[int] = (),
    engine: Engine | None = None,
) -> tuple[list[int], FinishReason | None, Stats]:
    """Decode with an engine alone: (token ids of the reply, why it ended, statistics). Token 65 reads as "A"."""
    engine = engine or Engine(target, drafter, draft)
    sampler = sampling.sampler(prompt)
    room = target.context_length - len(prompt)
    stream = TextStream(sampling, eos, lambda ids: "".join(map(chr, ids)), room)
    request = engine.start(sampler, stream, Stats(sampler.noise.seed, "rounding"))
    try:
        engine.prefill(request)
        while request.finish is None:
            engine.step([request])
    finally:
        engine.finish(request)
    request.stats.close()
    return request.text[len(prompt) :], request.finish, request.stats


class Oracle(Drafter):
    """Knows the whole text beforehand and errs at a chosen rate: a drafter of any acceptance you like.

    At every node the true next token is among the children with probability `accuracy`, the rest is noise. With
    accuracy 0 it is hostile: always wrong.
    """

    def __init__(self, text: Sequence[int], accuracy: float, vocab_size: int, seed: int = 0) -> None:
        self._text, self._accuracy, self._vocab = list(text), accuracy, vocab_size
        self._random = random.Random(seed)

    def admit(self, slot: int, prompt: Sequence[int]) -> None: ...

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None: ...

    def release(self, slot: int) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        level = [0]
        for depth in range(ask.budget.depth):
            level, parent_level = [], level
            for parent in parent_level:
                children = self._children(ask.position + 1 + depth, ask.budget.branch)
                for token in children[: ask.budget.nodes - len(tokens)]:
                    tokens.append(token)
                    parents.append(parent)
                    level.append(len(tokens))
        return Draft(tuple(tokens), tuple(parents))

    def _children(self, position: int, branch: int) -> list[int]:
        true = self._text[position] if position < len(self._text) else 0
        wrong = [t for t in self._random.sample(range(self._vocab), min(branch + 1, self._vocab)) if t != true]
        if self._random.random() < self._accuracy:
            wrong[self._random.randrange(branch)] = true
        return wrong[:branch]


def check_drafter(make: Callable[[], Drafter], target: Target | None = None) -> None:
    """What every drafter must keep to, tried on a toy target; raises `AssertionError` saying what broke.

    Lossless text, drafts that are trees within their budget and drawn from the q they name, slots that do not disturb
    each other, a life that may end at any moment. `make` makes a fresh drafter for a target of 37 tokens (or for the
    `target` given).
    """
    target = target or tiny_target()
    prompt = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
    for shape in (Tree.chain(1), Tree.chain(6), Tree(10, 4, 3)):
        for temperature in (0.0, 0.9):
            sampling = Sampling(max_new_tokens=32, temperature=temperature, seed=7)
            watched = _Checked(make())
            plain = run(target, prompt, sampling)[0]
            engine = Engine(target, watched, shape)
            assert run(target, prompt, sampling, engine=engine)[0] == plain, "the text depends on the drafter"
            assert run(target, prompt, sampling, engine=engine)[0] == plain, "a slot is not as new after release"
        run(target, prompt, Sampling(max_new_tokens=32, temperature=0.9, seed=7, rule="block"), engine=engine)
    _check_lives(make(), prompt)


def _check_lives(drafter: Drafter, prompt: Sequence[int]) -> None:
    """Slots come and go in any order, and nothing that was never admitted needs care."""
    sampler = Sampling().sampler(prompt)
    ask = [Ask(slot, Tree.chain(4), sampler) for slot in range(2)]
    drafter.release(5)
    drafter.admit(0, prompt)
    alone = drafter.propose(ask[:1])
    drafter.admit(1, [*prompt[-2::-1], prompt[-1]])
    assert drafter.propose(ask)[0] == alone[0], "another slot, or asking twice, changes a draft"
    drafter.release(1)
    drafter.release(1)
    assert drafter.propose(ask[:1]) == alone, "releasing one slot changes another"
    none = Ask(0, Tree.chain(0), sampler)
    assert drafter.propose([none]) == [Draft()], "a draft without a budget"
    drafter.release(0)


class _Checked(Drafter):
    """Passes everything on, and looks at every draft."""

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.taps, self.draft = inner, inner.taps, inner.draft

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._inner.admit(slot, prompt)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._inner.feed(slot, tokens, taps)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._inner.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        self._inner.release(slot)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = self._inner.propose(asks)
        assert len(drafts) == len(asks), "one draft per ask"
        for ask, draft in zip(asks, drafts, strict=True):
            check(draft)
            assert len(draft.tokens) <= ask.budget.nodes, "more nodes than the budget"
            assert max(depths(draft.parents)) <= ask.budget.depth, "deeper than the budget"
            children = Counter(draft.parents)
            assert max(children.values(), default=0) <= ask.budget.branch, "more branches than the budget"
            for parent, token in zip(draft.parents, draft.tokens, strict=True):
                assert parent not in draft.q or draft.q[parent][token] > 0, "a token that its q rules out"
        return drafts
