"""DRY against the formula, token by token, and its sequence breakers against the tokens of real kinds of tokenizers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.errors import InvalidOption
from paceline.sampling.dry import Breakers, Dry
from paceline.sampling.parameters import Sampling, Vocabulary
from paceline.sampling.sampler import Prefix
from tests.support.vocabularies import byte_level, sentencepiece

WIDTH = 12
BREAKERS = {9: [()], 8: [(1,), (1, 2)], 7: [(), (3,)]}


def since_breaker(text: Sequence[int], breakers: dict[int, list[tuple[int, ...]]]) -> int:
    """Tokens after the last place at which a breaker, first token and tail, stands; the longest tail counts."""
    for head in reversed(range(len(text))):
        fitting = [t for t in breakers.get(text[head], []) if tuple(text[head + 1 : head + 1 + len(t)]) == t]
        if fitting:
            return len(text) - 1 - head - max(map(len, fitting))
    return len(text)


def penalties(
    text: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: dict[int, list[tuple[int, ...]]],
) -> list[float]:
    """The formula of llama.cpp, from the text alone."""
    text = list(text[-last_n:] if last_n > 0 else text)
    found = [0.0] * WIDTH
    limit = since_breaker(text, breakers)
    if len(text) <= allowed or limit < allowed:
        return found
    for token in range(WIDTH):
        repeated = [
            sum(1 for _ in common(text[: place + 1], text, limit))
            for place in range(len(text) - 1)
            if text[place + 1] == token
        ]
        if repeated and max(repeated) >= allowed and () not in breakers.get(token, []):
            found[token] = multiplier * base ** (max(repeated) - allowed)
    return found


def common(left: Sequence[int], right: Sequence[int], limit: int) -> list[int]:
    """The last tokens that two texts share, `limit` of them at most."""
    shared: list[int] = []
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b or len(shared) == limit:
            break
        shared.append(a)
    return shared


@pytest.mark.parametrize("seed", range(40))
def test_penalties_are_those_of_the_formula_at_every_row_of_every_draft(seed: int) -> None:
    draw = random.Random(seed)
    letters = draw.choice([2, 3, 10])
    settings = (
        draw.choice([0.5, 2.0]),
        draw.choice([1.0, 1.1, 1.75]),
        draw.choice([0, 1, 2, 5]),
        draw.choice([-1, 4, 30]),
    )
    breakers = draw.choice([{}, BREAKERS])
    dry = Dry(*settings, Breakers(breakers))
    text = [draw.randrange(letters) for _ in range(draw.randrange(40))]
    for _ in range(8):
        paths = [[draw.randrange(letters) for _ in range(draw.randrange(5))] for _ in range(4)]
        for path in paths:
            row = dry(Prefix(text, path, 3), torch.zeros(WIDTH, dtype=torch.float64))
            assert (-row).tolist() == pytest.approx(penalties([*text, *path], *settings, breakers))
        text = [*text, *paths[0], draw.randrange(letters)]


def test_a_long_repetition_overflows_nothing() -> None:
    row = Dry(1000.0, 5.0)(Prefix([1] * 500), torch.zeros(4))
    assert torch.isfinite(row).all()
    assert row[1] < -1e30
    assert row[[0, 2, 3]].tolist() == [0, 0, 0]


def test_a_row_of_fewer_tokens_is_penalised_as_far_as_it_goes() -> None:
    text = Prefix([5, 1, 2, 7, 5, 1, 2])
    assert Dry(1.0)(text, torch.zeros(9))[7] < 0
    assert Dry(1.0)(text, torch.zeros(6)).tolist() == [0] * 6


@pytest.mark.parametrize("words", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_a_breaker_is_found_however_the_tokenizer_splits_it(words) -> None:  # type: ignore[no-untyped-def]
    breakers = Breakers.of(("the", "\n"), words)
    for token, spelling in words.token_bytes.items():
        assert breakers.alone(token) == (b"the" in spelling or b"\n" in spelling)
    after = words.spell("xyz")
    for size in (1, 2):
        begun = [i for i, spelling in words.token_bytes.items() if spelling.endswith(b"the"[:size])]
        for head in (token for token in begun if not breakers.alone(token)):
            assert breakers.since([1, head, *words.spell("the"[size:]), *after], 100) == len(after)
            assert breakers.since([1, head, *after], 100) == 100
    assert Breakers.of(("the", "\n"), words) is breakers


def test_a_special_token_can_be_a_breaker() -> None:
    words = sentencepiece()
    end = words.token_id("</s>")
    assert end is not None
    assert Breakers.of(("</s>",), words).alone(end)


def test_dry_needs_a_tokenizer_for_its_breakers_alone() -> None:
    with pytest.raises(InvalidOption, match="dry_sequence_breakers needs a tokenizer"):
        Sampling(dry_multiplier=1.0).sampler(vocabulary=Vocabulary(9))
    sampler = Sampling(dry_multiplier=1.0, dry_sequence_breakers=()).sampler(vocabulary=Vocabulary(9))
    assert sampler.process(Prefix([5, 1, 2, 7, 5, 1, 2]), torch.zeros(9))[7] == -1.75
    words = byte_level()
    spaced = Sampling(dry_multiplier=1.0, dry_sequence_breakers=["a"]).sampler(
        vocabulary=Vocabulary(400, tokenizer=words)
    )
    text = words.spell("xyz xyz xyz")
    assert spaced.process(Prefix(text), torch.zeros(400)).min() < 0
    assert spaced.process(Prefix(words.spell("xyaz xyaz")), torch.zeros(400)).min() == 0
