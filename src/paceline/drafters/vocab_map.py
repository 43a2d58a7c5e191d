"""A mapping between two vocabularies: tokens with the same text, and spellings for all other tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from paceline.checkpoints.loader import Loaded
from paceline.text.token_bytes import Speller

SAMPLE = """The quick answer, she said, isn't always the best one: in 1987 about 40% of all readers (some 12,500 people)
had never heard of it. "Why not?" I don't know; perhaps nobody told them.

- First, open the window and let the light in.
- Then write down what you see, step by step, and compare it with yesterday's notes.

def mean(values):
    total = sum(value for value in values if value > 0)
    return total / max(len(values), 1)  # empty lists give 0

El tiempo pasa rápidamente cuando uno lee. Die Straße führt über den Fluss. Les élèves étaient déjà là.
"""
"""Sample text of several kinds, to measure which tokens a tokenizer uses in practice."""


class VocabMap:
    """Mapping between the vocabularies of a target and of a draft model with another tokenizer."""

    def __init__(self, target: Loaded, draft: Loaded) -> None:
        self.target, self.draft = target, draft
        self._spelled: dict[int, tuple[int, ...]] = {}

    @cached_property
    def target_bytes(self) -> dict[int, bytes]:
        """Target id -> bytes, for ordinary tokens."""
        return _token_bytes(self.target)

    @cached_property
    def draft_bytes(self) -> dict[int, bytes]:
        """Draft id -> bytes, for ordinary tokens."""
        return _token_bytes(self.draft)

    @cached_property
    def speller(self) -> Speller:
        """Spells bytes in target tokens."""
        return Speller(self.target_bytes)

    @cached_property
    def _respeller(self) -> Speller:
        """Spells bytes in draft tokens."""
        return Speller(self.draft_bytes)

    @cached_property
    def shared(self) -> dict[int, int]:
        """Target id -> draft id, for tokens with the same bytes, the same special tokens, and EOS tokens."""
        target, draft = self.speller.ids, self._respeller.ids
        return {target[text]: draft[text] for text in target if text in draft} | self.special

    @cached_property
    def special(self) -> dict[int, int]:
        """Target id -> draft id, for the special tokens and EOS tokens in `shared`."""
        ours, theirs = _special(self.target), _special(self.draft)
        same = {ours[name]: theirs[name] for name in ours.keys() & theirs.keys()}
        over = _ends(self.draft)[:1]
        ends = {end: theirs for end in _ends(self.target) for theirs in over}
        return ends | same

    @cached_property
    def ends(self) -> dict[int, int]:
        """Draft id -> target id, for special tokens and EOS tokens."""
        every = {end: ours for end in _ends(self.draft) for ours in _ends(self.target)[:1]}
        return every | {d: t for t, d in reversed(self.special.items())}

    @cached_property
    def opening(self) -> list[int]:
        """The draft tokens that the draft model's tokenizer puts before every text."""
        return _opening(self.draft)

    def without_opening(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return a prompt without the tokens that the target's tokenizer puts before every text."""
        own = _opening(self.target)
        return prompt[len(own) :] if list(prompt[: len(own)]) == own else prompt

    def shared_fraction(self) -> float:
        """Return the share (0 to 1) of the target's tokens in `SAMPLE` that the draft model also has."""
        tokens = self.target.tokenizer.encode(SAMPLE, special=False)
        return sum(token in self.shared for token in tokens) / max(len(tokens), 1)

    def pieces(self, tokens: Iterable[int]) -> Iterable[int | bytes]:
        """Yield the bytes of each target token, or its draft id if it is special."""
        for token in tokens:
            if token in self.special:
                yield self.special[token]
            elif token in self.target_bytes:
                yield self.target_bytes[token]
            else:
                yield self._names.get(token, "").encode(errors="replace")

    def respell(self, token: int) -> tuple[int, ...]:
        """Return draft tokens that spell a target token. The result is empty if the token has no text."""
        if token not in self._spelled:
            self._spelled[token] = tuple(self._in_draft(token))
        return self._spelled[token]

    def _in_draft(self, token: int) -> Sequence[int]:
        if token in self.shared:
            return [self.shared[token]]
        return [
            i
            for piece in self.pieces([token])
            for i in ([piece] if isinstance(piece, int) else self._respeller.spell(piece))
        ]

    @cached_property
    def _names(self) -> dict[int, str]:
        """Target id -> name, for special tokens."""
        return {i: name for name, i in _special(self.target).items()}


def _token_bytes(model: Loaded) -> dict[int, bytes]:
    """Return id -> bytes, for tokens that have a row in the model and are not empty."""
    rows = model.target.vocab_size
    return {i: text for i, text in model.tokenizer.token_bytes.items() if text and i < rows}


def _ends(model: Loaded) -> list[int]:
    """Return the ids of EOS tokens. The tokenizer's own EOS token comes first."""
    own = model.tokenizer.eos_token_id
    return list(dict.fromkeys([*([] if own is None else [own]), *model.eos]))


def _opening(model: Loaded) -> list[int]:
    begin = model.tokenizer.bos_token_id
    return [begin] if begin is not None and begin in model.tokenizer.encode("") else []


def _special(model: Loaded) -> dict[str, int]:
    rows, special = model.target.vocab_size, model.tokenizer.special_ids
    return {name: i for name, i in model.tokenizer.vocabulary.items() if i in special and i < rows}
