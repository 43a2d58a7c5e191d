"""A custom engine with attention over its own cache and ragged prompts, which uses only Paceline's functions. Its text
must equal plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.functional import (
    Accepted,
    CandidateTree,
    Level,
    TreeConfig,
    append,
    attention_bias,
    gather_kv_,
    grow,
    inputs,
    positions,
    sample,
    verify_greedy,
    verify_rejection,
    verify_sampling,
)
from paceline.sampling.noise import Noise

VOCAB, WIDTH, LAYERS, ROOM, NEW = 11, 16, 2, 64, 24
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9, 3])


class Engine:
    """Two attention layers with learned positions, in float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator) / 2

        self.embed, self.place, self.out = weight(VOCAB, WIDTH), weight(ROOM, WIDTH), weight(WIDTH, VOCAB)
        self.layers = [[weight(WIDTH, WIDTH) for _ in range(4)] for _ in range(LAYERS)]
        self.cache = torch.zeros(LAYERS, 2, len(PROMPTS), 2, ROOM, WIDTH // 2, dtype=torch.float64)

    def forward(self, tokens: Tensor, places: Tensor, start: Tensor, bias: Tensor) -> Tensor:
        """Run rows [B, T] at `places`, and write them to the columns from `start` [B]. Return logits [B, T, V]."""
        batch, count = tokens.shape
        columns = start[:, None] + torch.arange(count)
        x = self.embed[tokens] + self.place[places]
        for (q, k, v, mix), cache in zip(self.layers, self.cache, strict=True):
            heads = [(x @ w).view(batch, count, 2, -1).transpose(1, 2) for w in (q, k, v)]
            for stored, new in zip(cache, heads[1:], strict=True):
                stored.scatter_(2, columns[:, None, :, None].expand_as(new), new)
            seen = torch.nn.functional.scaled_dot_product_attention(heads[0], *cache, attn_mask=bias)
            x = x + torch.tanh(seen.transpose(1, 2).flatten(2) @ mix)
        return x @ self.out

    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, L, V] of whole texts without a cache."""
        self.cache.zero_()
        count = tokens.shape[1]
        bias = torch.full((count, ROOM), -torch.inf, dtype=torch.float64).triu(1)
        start = torch.zeros(len(tokens), dtype=torch.int64)
        return self.forward(tokens, torch.arange(count).expand_as(tokens), start, bias)


def alone(engine: Engine, prompt: list[int], choose: Callable[[Tensor, int], int]) -> list[int]:
    """Decode one request plainly, and feed the whole text again for every token."""
    text = list(prompt)
    for position in range(len(prompt), len(prompt) + NEW):
        rows = torch.tensor([text] * len(PROMPTS))
        text.append(choose(engine.plain(rows)[0, -1], position))
    return text


class Drafter:
    """The target with noisy weights. It reads the text so far and each node's path."""

    def __init__(self, noise: float) -> None:
        self.model = Engine()
        self.model.out = self.model.out + noise * torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(1))
        self.texts = torch.empty(0)
        self.lengths = torch.empty(0)

    def root(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        text = torch.nn.functional.pad(tokens.clamp(min=0), (0, 8))
        self.texts, self.lengths = text[:, None], lengths
        return self.model.plain(text)[torch.arange(len(text)), lengths]

    def __call__(self, level: Level) -> Tensor:
        batch = torch.arange(len(self.texts))
        self.texts = self.texts[batch[:, None], level.parents].clone()
        self.texts[batch, :, self.lengths + level.depth] = level.tokens
        return torch.stack(
            [self.model.plain(text)[batch, self.lengths + level.depth] for text in self.texts.unbind(1)], 1
        )


Verify = Callable[[CandidateTree, Tensor, Tensor, Tensor], Accepted]


def decode(noise: float, config: TreeConfig, verify: Verify, drawn: bool = False) -> tuple[list[list[int]], int]:
    """Return the texts for all prompts, and the number of rounds."""
    engine, drafter = Engine(), Drafter(noise)
    prompts = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in PROMPTS], batch_first=True, padding_value=-1)
    ends = torch.tensor([len(p) - 1 + NEW for p in PROMPTS])
    tokens, lengths = prompts, ends - NEW
    engine.plain(prompts.clamp(min=0))
    rounds = 0
    while bool((lengths < ends).any()):
        root = drafter.root(tokens, lengths)
        tree, q = sample(drafter, root, config) if drawn else (grow(drafter, root, config), torch.empty(0))
        pending = tokens.gather(1, lengths[:, None])[:, 0]
        bias = attention_bias(tree, lengths, ROOM, torch.float64)
        logits = engine.forward(inputs(tree, pending), positions(tree, lengths), lengths, bias)
        accepted = verify(tree, logits, q, lengths).cut(ends - lengths)
        for cache in engine.cache.flatten(0, 1):
            gather_kv_(cache, lengths, accepted)
        tokens, lengths = append(tokens, lengths, accepted)
        rounds += 1
    return [row[: end + 1].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)], rounds


GREEDY = [alone(Engine(), prompt, lambda row, position: int(row.argmax())) for prompt in PROMPTS]


def greedy(tree: CandidateTree, logits: Tensor, q: Tensor, lengths: Tensor) -> Accepted:
    return verify_greedy(tree, logits)


@pytest.mark.parametrize(
    ("noise", "config"),
    [
        (0.0, TreeConfig(1, 4, 4)),
        (0.5, TreeConfig(1, 4, 4)),
        (0.5, TreeConfig(3, 3, 9)),
        (0.5, TreeConfig(2, 4, 8, torch.tensor([0.0, 0.2, 0.5, 1.0]))),
        (9.0, TreeConfig(3, 3, 9)),
    ],
)
def test_ragged_prompts_decode_like_single_prompts(noise: float, config: TreeConfig) -> None:
    texts, rounds = decode(noise, config, greedy)
    assert texts == GREEDY
    if noise == 0.0:
        assert rounds == -(-NEW // 5)
    elif config.confidence is None:
        assert -(-NEW // 5) < rounds < NEW


def test_sampled_text_equals_plain_sampling_with_the_same_noise() -> None:
    ids = torch.arange(VOCAB)
    noises = [Noise(seed=b) for b in range(len(PROMPTS))]

    def verify(tree: CandidateTree, logits: Tensor, q: Tensor, lengths: Tensor) -> Accepted:
        noise = [
            torch.stack([noises[b].gumbel(length + 1 + depth, ids) for depth in range(tree.max_depth + 1)])
            for b, length in enumerate(lengths.tolist())
        ]
        return verify_sampling(tree, logits, temperature=0.8, noise=torch.stack(noise))

    expected = [
        alone(
            Engine(),
            prompt,
            lambda row, at, n=n: int(((row / 0.8).log_softmax(-1) + n.gumbel(at, ids)).argmax()),  # type: ignore[misc]
        )
        for n, prompt in zip(noises, PROMPTS, strict=True)
    ]
    texts, rounds = decode(0.5, TreeConfig(3, 3, 9), verify)
    assert texts == expected
    assert rounds < NEW


def test_drawn_candidates_at_temperature_zero_decode_to_the_greedy_text() -> None:
    def verify(tree: CandidateTree, logits: Tensor, q: Tensor, lengths: Tensor) -> Accepted:
        return verify_rejection(tree, logits, q, temperature=0.0)

    torch.manual_seed(0)
    texts, rounds = decode(0.5, TreeConfig(2, 3, 8), verify, drawn=True)
    assert texts == GREEDY
    assert rounds < NEW


def test_keys_that_are_not_moved_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control: if rows are not moved, a tree's later rows are in the place of the text."""
    monkeypatch.setitem(globals(), "gather_kv_", lambda cache, lengths, accepted: cache)
    assert decode(0.5, TreeConfig(3, 3, 9), greedy)[0] != GREEDY
