"""DRY compared with its formula, token by token, and its sequence breakers with the tokens of several tokenizers."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

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
    """Return the tokens after the last breaker, which is a first token and a tail. The longest tail counts."""
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
    """Compute llama.cpp's formula directly from the text."""
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
    """Return the number of equal tokens at the end of two texts, at most `limit`."""
    shared: list[int] = []
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b or len(shared) == limit:
            break
        shared.append(a)
    return shared


@pytest.mark.parametrize("seed", range(40))
def test_penalties_equal_the_formula_at_every_row_of_every_draft(seed: int) -> None:
    draw = random.Random(seed)
    letters = draw.choice([2, 3, 10])
    settings = (
        draw.choice([0.5, 2.0]),
        draw.choice([1.0, 1.1, 1.75]),
        draw.choice([0, 1, 2, 5]),
        draw.choice([-1, 4, 30]),
    )
    breakers = draw.choice([{}, BREAKERS])
    dry = Dry(*settings, Breakers(lambda token: breakers.get(token, [])))
    text = [draw.randrange(letters) for _ in range(draw.randrange(40))]
    for _ in range(8):
        paths = [[draw.randrange(letters) for _ in range(draw.randrange(5))] for _ in range(4)]
        for path in paths:
            row = dry(Prefix(text, path, 3), torch.zeros(WIDTH, dtype=torch.float64))
            assert (-row).tolist() == pytest.approx(penalties([*text, *path], *settings, breakers))
        text = [*text, *paths[0], draw.randrange(letters)]


def test_a_long_repetition_does_not_overflow() -> None:
    row = Dry(1000.0, 5.0)(Prefix([1] * 500), torch.zeros(4))
    assert torch.isfinite(row).all()
    assert row[1] < -1e29
    assert row[[0, 2, 3]].tolist() == [0, 0, 0]


def test_a_long_repetition_leaves_the_only_allowed_token() -> None:
    dry = {"dry_multiplier": 1000.0, "dry_base": 1000.0, "dry_sequence_breakers": ()}
    for temperature in (0.0, 0.001, 0.1):
        how = Sampling(temperature=temperature, seed=1, logit_bias={0: -math.inf, 2: -math.inf}, **dry)
        assert how.sampler().choose(Prefix([1] * 60), torch.zeros(3)) == 1


def test_the_cost_of_a_row_does_not_grow_with_the_distance_of_a_breaker() -> None:
    asked: list[int] = []

    def tails(token: int) -> list[tuple[int, ...]]:
        asked.append(token)
        return [(9,)]

    dry = Dry(1.0, 1.0, breakers=Breakers(tails))
    text = Prefix([1, 2, 3] * 200)
    dry(text, torch.zeros(12))
    asked.clear()
    for path in ((1,), (1, 2), (1, 2, 3)):
        dry(text.after(path), torch.zeros(12))
    assert len(asked) < 100


def test_drafted_rows_take_no_memory_of_the_texts_length() -> None:
    text = Prefix(random.Random(0).sample(range(100_000), 50_000))
    dry, row = Dry(1.0), torch.zeros(12)
    dry(text, row)
    tracemalloc.start()
    for length in range(1, 65):
        dry(text.after(range(length)), row)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000  # two arrays of the text's length for each row would take 26 MB


def test_breakers_look_only_at_tokens_of_the_text() -> None:
    words, spelled = byte_level(), []

    class Counting(dict[int, bytes]):
        def get(self, key: int, default: Any = None) -> Any:
            spelled.append(key)
            return super().get(key, default)

    class Tokenizer:
        token_bytes = Counting(words.token_bytes)
        token_id, spell = staticmethod(lambda text: None), staticmethod(words.spell)

    breakers = Breakers.of(["e" * 40, "\n"], Tokenizer())  # type: ignore[arg-type]
    assert breakers.find_last([5, 6, 5, 6]) is None
    assert sorted(spelled) == [5, 6]


def test_a_narrower_row_is_penalised_only_for_its_own_tokens() -> None:
    text = Prefix([5, 1, 2, 7, 5, 1, 2])
    assert Dry(1.0)(text, torch.zeros(9))[7] < 0
    assert Dry(1.0)(text, torch.zeros(6)).tolist() == [0] * 6


@pytest.mark.parametrize("words", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_a_breaker_is_found_however_the_tokenizer_splits_it(words) -> None:  # type: ignore[no-untyped-def]
    breakers = Breakers.of(("the", "\n"), words)
    for token, spelling in words.token_bytes.items():
        assert breakers.is_breaker(token) == (b"the" in spelling or b"\n" in spelling)
    after = words.spell("xyz")
    for size in (1, 2):
        begun = [i for i, spelling in words.token_bytes.items() if spelling.endswith(b"the"[:size])]
        for head in (token for token in begun if not breakers.is_breaker(token)):
            tail = words.spell("the"[size:])
            assert breakers.find_last([1, head, *tail, *after]) == (1, 2 + len(tail))
            assert breakers.find_last([1, head, *after]) is None


def test_a_special_token_can_be_a_breaker() -> None:
    words = sentencepiece()
    end = words.token_id("</s>")
    assert end is not None
    assert Breakers.of(("</s>",), words).is_breaker(end)


def test_dry_needs_a_tokenizer_only_for_its_breakers() -> None:
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
