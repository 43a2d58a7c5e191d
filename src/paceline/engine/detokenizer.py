"""Conversion of tokens to text while a reply is generated: complete characters, stop strings, and the reply's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import PromptTooLong
from paceline.sampling.parameters import Sampling
from paceline.text.growing import overlap
from paceline.types import Draft, FinishReason, Verdict

Decode = Callable[[Sequence[int]], str]

Origin = Literal["draft", "correction", "bonus", "plain"]
"""Origin of a token: "draft" if it was drafted and accepted. Otherwise the target added it: after a rejection
("correction"), after a draft that was accepted as a whole ("bonus"), or without a draft ("plain")."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
"""Maximum number of bytes in a UTF-8 character. One character therefore spans at most this number of tokens."""
_MAX_INCOMPLETE_TOKENS = 2 * _MAX_CHARACTER_BYTES
"""Maximum number of tokens that wait for the rest of a character. More tokens cannot be valid UTF-8, so they are shown
as U+FFFD."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (natural logarithms) at the position of one token, before any penalty, ban, temperature or
    truncation.

    Attributes:
        chosen: Log-probability of the reply's token.
        top: Token ids and log-probabilities of the likeliest tokens, likeliest first. The reply's token is among them
            only if it is likely enough.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token of a streamed reply. The texts of all chunks, joined, are the text of the reply.

    Attributes:
        text: New text. It is empty if the token is only part of a character, or if its text is held back because it may
            begin a stop string. It also contains text that was held back before and is now released.
        token_id: Id of the token.
        origin: Origin of the token (see `Origin`).
        finish_reason: Why the reply ended. Only the last chunk has it.
        logprobs: Log-probabilities, if they were requested.
        stop: The stop string that ended the reply, or None.
    """

    text: str
    token_id: int
    origin: Origin
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    stop: str | None = None

    @property
    def drafted(self) -> bool:
        """True if the token was drafted and accepted. Otherwise the target added it."""
        return self.origin == "draft"


class Detokenizer:
    """Decodes a text token by token. The pieces, joined, equal `decode(all tokens)`, and no piece ends inside a
    character.

    If the bytes are invalid UTF-8, the joined pieces may differ from `decode(all tokens)`, because some tokenizers also
    replace valid bytes next to invalid ones.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # A token may decode differently at the start of a text. So each piece is the difference between two decodings
        # that begin with the same few tokens.
        self._window: list[int] = []
        self._shown = ""
        self._fresh = 0

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes. The text is empty while a character is incomplete."""
        self._window = [*self._window, token]  # a new list, because copies of this object share the old one
        self._fresh += 1
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT) and len(text) > len(self._shown):
            return self._show(text, 0)
        if not self._decode([token, token]):
            # This is a special token, which `decode` omits. Decode it twice, since `decode` may also strip the first
            # space of a text.
            self._window = self._window[:-1]
            self._fresh -= 1
        elif self._fresh > _MAX_INCOMPLETE_TOKENS:
            held = min(range(1, _MAX_CHARACTER_BYTES + 1), key=self._characters)
            return self._show(self._decode(self._window[:-held]), held)
        return ""

    def flush(self) -> str:
        """End the text. Return an incomplete character as the tokenizer decodes it, or an empty string."""
        piece = self._decode(self._window)[len(self._shown) :]
        self._window, self._shown, self._fresh = [], "", 0
        return piece

    def _show(self, text: str, held: int) -> str:
        """Return the new part of `text`, which is the decoded window without its last `held` tokens."""
        piece = text[len(self._shown) :]
        self._window = self._window[-self._fresh :]
        self._shown = self._decode(self._window[: len(self._window) - held])
        self._fresh = held
        return piece

    def _characters(self, held: int) -> int:
        """Return the number of characters that the window has if it is cut before its last `held` tokens. The cut with
        the fewest characters does not split a character."""
        return len(self._decode(self._window[:-held])) + len(self._decode(self._window[-held:]))


class StopStrings:
    """Passes text on until the first stop string. Text that may be the beginning of a stop string is held back.

    Stop strings inside the reasoning are ignored.
    """

    def __init__(
        self, stops: Sequence[str], reasoning: Sequence[str] = (), special: Mapping[int, str] | None = None
    ) -> None:
        """Make a filter.

        Args:
            stops: The stop strings.
            reasoning: See `Sampling.reasoning`.
            special: Token id -> text, for the special tokens in `reasoning`, which decoded text omits.
        """
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text. None as long as none has been found."""
        self._begin, self._end = (*reasoning, "", "")[:2] if stops else ("", "")
        """Opening and closing tag of the reasoning. `_begin` becomes empty when the reasoning begins. `_end` becomes
        empty when it ends, or when the reply turns out to have none."""
        self._special = special or {}
        self._window = ""
        """The end of the reasoning so far, including special tokens. Before the reasoning: text that may be its opening
        tag."""

    def push(self, text: str, token: int = -1) -> tuple[str, bool]:
        """Add text.

        Args:
            text: New text.
            token: Id of the token that the text comes from.

        Returns:
            A pair: the text that can be shown, and True if a stop string was found.
        """
        if not self._end:
            return self._push(text)
        self._window += text + self._special.get(token, "")
        return self._before_reasoning(text) if self._begin else self._in_reasoning(text)

    def _before_reasoning(self, text: str) -> tuple[str, bool]:
        """Handle text at the start of the reply. Hold it back until it is clear if the reply begins with reasoning."""
        self._held += text
        self._window = self._window.lstrip()
        if self._begin.startswith(self._window) and self._begin != self._window:
            return "", False
        held, self._held = self._held, ""
        if self._window.startswith(self._begin):
            self._begin = ""
            return self._in_reasoning(held)
        self._end = ""
        return self._push(held)

    def _in_reasoning(self, text: str) -> tuple[str, bool]:
        """Pass text on until the end of the reasoning, and look for stop strings in the text after it."""
        _, ended, after = self._window.partition(self._end)
        if not ended:
            self._window = self._window[max(0, len(self._window) - len(self._end) + 1) :]
            return text, False
        self._end = ""
        shown, stopped = self._push(after)
        return text[: len(text) - len(after)] + shown, stopped

    def _push(self, text: str) -> tuple[str, bool]:
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            safe, self._held = self._held[:at], ""
            return safe, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        """End the text. Return text that was held back because it might have begun a stop string."""
        safe, self._held = self._held, ""
        return safe


@dataclass(slots=True)
class _State:
    """The state of a reply's text after some number of tokens.

    Attributes:
        left: Number of tokens that may follow.
        detokenizer: Decodes tokens.
        stops: Finds stop strings.
        count: Number of tokens so far.
        ids: Token ids so far, possibly followed by the ids of a round that failed. They are kept only if there are
            stopping criteria.
        text: Text so far. It is kept only if there are stopping criteria.
    """

    left: int
    detokenizer: Detokenizer
    stops: StopStrings
    count: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def copy(self) -> _State:
        """Return a copy that shares `ids`. Copying the ids would take longer with every round."""
        del self.ids[self.count :]
        return _State(self.left, copy(self.detokenizer), copy(self.stops), self.count, self.ids, self.text)


@dataclass(frozen=True, slots=True)
class TrimmedVerdict(Verdict):
    """A verdict that is truncated where the reply ends.

    Attributes:
        chunks: One chunk per token.
        state: State of the text after these tokens.
        error: The error that ends the reply, or None. There are then no tokens.
    """

    chunks: tuple[Chunk, ...] = ()
    state: _State | None = None
    error: Exception | None = None


class TextStream:
    """The text of a reply. It truncates each verdict where the reply ends, and converts the verdict to chunks."""

    def __init__(
        self,
        sampling: Sampling,
        eos: Sequence[int],
        decode: Decode,
        room: int,
        special: Mapping[int, str] | None = None,
    ) -> None:
        """Begin the text of a reply.

        Args:
            sampling: The sampling parameters.
            eos: The model's EOS tokens.
            decode: Decodes token ids to text.
            room: Number of tokens for which the context still has room.
            special: Token id -> text, for the special tokens in `sampling.reasoning`.

        Raises:
            PromptTooLong: If `room` is negative.
        """
        if room < 0:
            raise PromptTooLong(f"the prompt is {-room} tokens longer than the model's context", "Shorten the prompt")
        self._ends: dict[int, FinishReason] = {} if sampling.ignore_eos else dict.fromkeys(eos, "eos")
        self._ends.update(dict.fromkeys(sampling.stop_token_ids, "stop"))
        self._criteria = (sampling.stop_when,) if callable(sampling.stop_when) else sampling.stop_when
        self.logprobs = sampling.logprobs
        self.empty = not sampling.max_new_tokens
        """True if `max_new_tokens` is 0."""
        stops = StopStrings(tuple(sampling.stop), sampling.reasoning, special)
        self._state = _State(min(sampling.max_new_tokens, room), Detokenizer(decode), stops)

    @property
    def left(self) -> int:
        """Number of tokens that may follow before the length limit."""
        return self._state.left

    def trim(self, verdict: Verdict, draft: Draft, logits: Tensor) -> TrimmedVerdict:
        """Truncate a verdict after the first token that ends the reply, and convert its tokens to chunks of text.

        A reply ends at EOS, a stop token, a stop string, a stopping criterion or the length limit. This has no side
        effects. Once the cache has committed the verdict, `emit` makes the new state of the text current.

        Args:
            verdict: The verdict.
            draft: The draft that was verified.
            logits: Logits [T, V] of the round's rows, for log-probabilities.
        """
        state, pieces = self._state.copy(), []
        for count, token in enumerate(verdict.tokens, 1):
            piece, finish = self._take(state, token)
            pieces.append(piece)
            if finish:
                verdict = verdict.cut(count, finish)
                break
        origins: list[Origin] = ["draft"] * len(verdict.path)
        origins.append(_origin(draft, verdict))
        ends: list[FinishReason | None] = [None] * (len(pieces) - 1) + [verdict.finish]
        stops = [None] * (len(pieces) - 1) + [state.stops.found]
        logprobs = self._logprobs(verdict, logits)
        # If the reply ends inside the path, the target adds no token. `map` stops at the end of the shortest list.
        chunks = tuple(map(Chunk, pieces, verdict.tokens, origins, ends, logprobs, stops))
        return TrimmedVerdict(verdict.path, verdict.tokens, verdict.finish, chunks, state)

    def emit(self, verdict: TrimmedVerdict) -> list[Chunk]:
        """Make the state that `trim` returned the current one, and return its chunks."""
        self._state = verdict.state or self._state
        return list(verdict.chunks)

    def _logprobs(self, verdict: Verdict, logits: Tensor) -> Sequence[Logprobs | None]:
        """Return the log-probabilities of each token. They are None if they were not requested.

        The first token comes from row 0, the next one from the first accepted row, and so on.
        """
        if self.logprobs is None or not verdict.tokens:
            return [None] * len(verdict.tokens)
        rows = [0, *verdict.path][: len(verdict.tokens)]
        logp = logits[rows].log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(verdict.tokens, device=logp.device)[:, None])[:, 0].tolist()
        values, ids = (x.tolist() for x in logp.topk(self.logprobs, -1))
        tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        return [Logprobs(*pair) for pair in zip(chosen, tops, strict=True)]

    def _take(self, state: _State, token: int) -> tuple[str, FinishReason | None]:
        """Advance `state` by one token. Return the text to show, and the finish reason, which is None if the reply goes
        on."""
        state.left -= 1
        finish = self._ends.get(token)
        text = "" if finish else state.detokenizer.push(token)
        piece, stopped = state.stops.push(text, token)
        if self._criteria:
            state.ids.append(token)
            state.count += 1
            state.text += text
            answers = [criterion(state.ids, state.text) for criterion in self._criteria]  # call all, even after a True
            finish = finish or ("stop" if any(answers) else None)
        if not stopped and (finish or state.left <= 0):
            finish = finish or "length"
            rest, stopped = state.stops.push(state.detokenizer.flush())
            piece += rest + ("" if stopped else state.stops.flush())
        return piece, "stop" if stopped else finish


def _origin(draft: Draft, verdict: Verdict) -> Origin:
    """Return the origin of the token that the target added."""
    if not draft.tokens:
        return "plain"
    return "correction" if (verdict.path[-1] if verdict.path else 0) in draft.parents else "bonus"
