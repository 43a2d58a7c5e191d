"""Two vocabularies side by side: which tokens say the same, and how to say the others."""

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
"""Text of several kinds, to see which tokens a tokenizer really uses."""


class VocabMap:
    """The words of a target and of a draft model that has another tokenizer."""

    def __init__(self, target: Loaded, draft: Loaded) -> None:
        self.target, self.draft = target, draft
        self._spelled: dict[int, tuple[int, ...]] = {}

    @cached_property
    def said(self) -> dict[int, bytes]:
        """What each ordinary target token adds to a text."""
        return _said(self.target)

    @cached_property
    def drafted(self) -> dict[int, bytes]:
        """What each ordinary draft token adds to a text."""
        return _said(self.draft)

    @cached_property
    def speller(self) -> Speller:
        """Bytes to target tokens."""
        return Speller(_first(self.said))

    @cached_property
    def _respeller(self) -> Speller:
        """Bytes to draft tokens."""
        return Speller(_first(self.drafted))

    @cached_property
    def shared(self) -> dict[int, int]:
        """Target id -> the draft id that says the same: the same bytes, the same special token, or an end."""
        ours, theirs = _first(self.said), _first(self.drafted)
        return {ours[said]: theirs[said] for said in ours if said in theirs} | self.special

    @cached_property
    def special(self) -> dict[int, int]:
        """The part of `shared` that is no text."""
        ours, theirs = _special(self.target), _special(self.draft)
        same = {ours[name]: theirs[name] for name in ours.keys() & theirs.keys()}
        over = _ends(self.draft)[:1]
        ends = {end: theirs for end in _ends(self.target) for theirs in over}
        return ends | same

    @cached_property
    def ends(self) -> dict[int, int]:
        """Draft id -> target id, for what is no text."""
        every = {end: ours for end in _ends(self.draft) for ours in _ends(self.target)[:1]}
        return every | {d: t for t, d in reversed(self.special.items())}

    @cached_property
    def opening(self) -> list[int]:
        """What the draft's tokenizer puts before every text."""
        return _opening(self.draft)

    def body(self, prompt: Sequence[int]) -> Sequence[int]:
        """A prompt without what the target's tokenizer puts before every text, for which `opening` stands."""
        own = _opening(self.target)
        return prompt[len(own) :] if list(prompt[: len(own)]) == own else prompt

    def share(self) -> float:
        """How many of the target's tokens for a text of several kinds the draft has too, from 0 to 1."""
        tokens = self.target.tokenizer.encode(SAMPLE, special=False)
        return sum(token in self.shared for token in tokens) / max(len(tokens), 1)

    def pieces(self, tokens: Iterable[int]) -> Iterable[int | bytes]:
        """Target tokens as text, and as draft ids where they are no text."""
        for token in tokens:
            if token in self.special:
                yield self.special[token]
            elif token in self.said:
                yield self.said[token]
            else:
                yield self._names.get(token, "").encode(errors="replace")

    def respell(self, token: int) -> tuple[int, ...]:
        """One target token in draft tokens; none for what cannot be said."""
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
        """Target id -> how the tokenizer spells it, for special tokens."""
        return {i: name for name, i in _special(self.target).items()}


def _said(model: Loaded) -> dict[int, bytes]:
    """Of the tokens that have a row in the model; those that say nothing left out."""
    rows = model.target.vocab_size
    return {i: said for i, said in model.tokenizer.token_bytes.items() if said and i < rows}


def _first(said: dict[int, bytes]) -> dict[bytes, int]:
    """Bytes -> the first token that says them."""
    return {text: i for i, text in reversed(said.items())}


def _ends(model: Loaded) -> list[int]:
    """The ids that end a text, the tokenizer's own first."""
    own = model.tokenizer.eos_token_id
    return list(dict.fromkeys([*([] if own is None else [own]), *model.eos]))


def _opening(model: Loaded) -> list[int]:
    begin = model.tokenizer.bos_token_id
    return [begin] if begin is not None and begin in model.tokenizer.encode("") else []


def _special(model: Loaded) -> dict[str, int]:
    rows, special = model.target.vocab_size, model.tokenizer.special_ids
    return {name: i for name, i in model.tokenizer.vocabulary.items() if i in special and i < rows}
