"""From tokens to text as it grows: whole characters, stop strings, the end of a reply."""

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
"""Of a token: drafted and accepted; the target's own after a rejection, after a draft that was accepted whole, or where
nothing was drafted."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CHARACTER = 4
"""Bytes, and so tokens, of a character in UTF-8 at most."""
_UNFINISHED = 2 * _CHARACTER
"""Tokens that wait for the rest of a character at most; more of them are not UTF-8, and are shown as U+FFFD."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one token, before any penalty, ban, temperature or truncation; natural logarithms.

    `chosen`: of the token itself. `top`: (token id, log-probability) of the likeliest tokens, likeliest first; the
    chosen one is among them if it is that likely.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token of a reply as it arrives. The texts of all chunks, joined, are the reply's text.

    `text` may be empty (part of a character, or held back because a stop string may begin there) or hold what was
    held back before. `finish_reason`: on the last chunk only. `logprobs`: if requested. `stop`: the stop string that
    ended the reply.
    """

    text: str
    token_id: int
    origin: Origin
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    stop: str | None = None

    @property
    def drafted(self) -> bool:
        """Whether the token was drafted and accepted; otherwise the target added it."""
        return self.origin == "draft"


class Detokenizer:
    """Decodes token by token; the pieces join to `decode(all tokens)`, and none ends inside a character.

    Only bytes that are not UTF-8 may read differently, where a tokenizer's `decode` replaces more than the broken ones.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # A token may decode differently at the start of a text, so each piece is the difference of two decodings
        # that share a few tokens before it.
        self._window: list[int] = []
        self._shown = ""
        self._fresh = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._window = [*self._window, token]  # a new list: copies of this object share the old one
        self._fresh += 1
        text = self._decode(self._window)
        if not text.endswith(_BROKEN) and len(text) > len(self._shown):
            return self._show(text, 0)
        if not self._decode([token, token]):
            # `decode` leaves out special tokens. Asked for two, since it may also strip the first space of a text.
            self._window = self._window[:-1]
            self._fresh -= 1
        elif self._fresh > _UNFINISHED:
            held = min(range(1, _CHARACTER + 1), key=self._characters)
            return self._show(self._decode(self._window[:-held]), held)
        return ""

    def flush(self) -> str:
        """What is left at the end: an incomplete character, shown as the tokenizer shows it."""
        piece = self._decode(self._window)[len(self._shown) :]
        self._window, self._shown, self._fresh = [], "", 0
        return piece

    def _show(self, text: str, held: int) -> str:
        """Return what is new in `text`, which the window decodes to without its last `held` tokens."""
        piece = text[len(self._shown) :]
        self._window = self._window[-self._fresh :]
        self._shown = self._decode(self._window[: len(self._window) - held])
        self._fresh = held
        return piece

    def _characters(self, held: int) -> int:
        """The characters of the window cut before its last `held` tokens: fewest where no character is cut in two."""
        return len(self._decode(self._window[:-held])) + len(self._decode(self._window[-held:]))


class StopStrings:
    """Lets text through up to the first stop string, holding back whatever may turn out to begin one.

    Stop strings do not count in reasoning, which passes as it is.
    """

    def __init__(
        self, stops: Sequence[str], reasoning: Sequence[str] = (), special: Mapping[int, str] | None = None
    ) -> None:
        """Make a filter.

        Args:
            stops: The stop strings.
            reasoning: See `Sampling.reasoning`.
            special: Special tokens of which `reasoning` consists, which decoded text leaves out, with their texts.
        """
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop string that is complete."""
        self._begin, self._end = (*reasoning, "", "")[:2] if stops else ("", "")
        self._special = special or {}
        self._window = ""
        """The end of the reasoning so far, with special tokens; before it begins, the text that may begin it."""

    def push(self, text: str, token: int = -1) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string is complete). `token`: the one that the text is from."""
        if not self._end:
            return self._push(text)
        self._window += text + self._special.get(token, "")
        return self._before_reasoning(text) if self._begin else self._in_reasoning(text)

    def _before_reasoning(self, text: str) -> tuple[str, bool]:
        """Tell whether the reply begins with reasoning. Until that is clear its text is held back."""
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
        """Let text through, up to the end of the reasoning."""
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
        """What was held back for a stop string that did not come."""
        safe, self._held = self._held, ""
        return safe


@dataclass(slots=True)
class _State:
    """The text of a reply up to some token: `left` tokens may follow; `ids` and `text` are kept for criteria only."""

    left: int
    detokenizer: Detokenizer
    stops: StopStrings
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def copy(self) -> _State:
        return _State(self.left, copy(self.detokenizer), copy(self.stops), list(self.ids), self.text)


@dataclass(frozen=True, slots=True)
class Trimmed(Verdict):
    """A verdict cut where the reply ends, with one chunk per token and the state of the text after them. `error`: ends
    the reply without a token."""

    chunks: tuple[Chunk, ...] = ()
    state: _State | None = None
    error: Exception | None = None


class TextStream:
    """A reply's text: cuts each verdict where the reply ends, and turns it into chunks."""

    def __init__(
        self,
        sampling: Sampling,
        eos: Sequence[int],
        decode: Decode,
        room: int,
        special: Mapping[int, str] | None = None,
    ) -> None:
        """`room`: tokens that the context has left for the reply; `eos`: the model's end-of-sequence tokens;
        `special`: special tokens that `sampling.reasoning` spells, with their texts. Raises `PromptTooLong` for a
        negative room."""
        if room < 0:
            raise PromptTooLong(f"the prompt is {-room} tokens longer than the model's context", "Shorten the prompt")
        self._ends: dict[int, FinishReason] = {} if sampling.ignore_eos else dict.fromkeys(eos, "eos")
        self._ends.update(dict.fromkeys(sampling.stop_token_ids, "stop"))
        self._criteria = (sampling.stop_when,) if callable(sampling.stop_when) else sampling.stop_when
        self.logprobs = sampling.logprobs
        self.empty = not sampling.max_new_tokens
        """Whether no token was asked for."""
        stops = StopStrings(tuple(sampling.stop), sampling.reasoning, special)
        self._state = _State(min(sampling.max_new_tokens, room), Detokenizer(decode), stops)

    @property
    def left(self) -> int:
        """Tokens that the length limit leaves for the reply."""
        return self._state.left

    def trim(self, verdict: Verdict, draft: Draft, logits: Tensor) -> Trimmed:
        """Return the verdict up to the first token that ends the reply: EOS, a stop token or string, a user's
        criterion, the length limit. Changes nothing: `emit` does.

        `logits` [T, V]: of the round's rows, for log-probabilities.
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
        # A reply that ends inside the path has no token of the target's own: `map` ends with the shortest.
        chunks = tuple(map(Chunk, pieces, verdict.tokens, origins, ends, logprobs, stops))
        return Trimmed(verdict.path, verdict.tokens, verdict.finish, chunks, state)

    def emit(self, verdict: Trimmed) -> list[Chunk]:
        """Advance by a verdict that `trim` returned last, and return its chunks."""
        self._state = verdict.state or self._state
        return list(verdict.chunks)

    def _logprobs(self, verdict: Verdict, logits: Tensor) -> Sequence[Logprobs | None]:
        """Each token comes from the row before it: the first from row 0, the next from the first accepted row."""
        if self.logprobs is None or not verdict.tokens:
            return [None] * len(verdict.tokens)
        rows = [0, *verdict.path][: len(verdict.tokens)]
        logp = logits[rows].log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(verdict.tokens, device=logp.device)[:, None])[:, 0].tolist()
        values, ids = (x.tolist() for x in logp.topk(self.logprobs, -1))
        tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        return [Logprobs(*pair) for pair in zip(chosen, tops, strict=True)]

    def _take(self, state: _State, token: int) -> tuple[str, FinishReason | None]:
        """Advance `state` by a token. Returns the text to show, and why the reply ends if it does."""
        state.left -= 1
        finish = self._ends.get(token)
        text = "" if finish else state.detokenizer.push(token)
        piece, stopped = state.stops.push(text, token)
        if self._criteria:
            state.ids.append(token)
            state.text += text
            answers = [criterion(state.ids, state.text) for criterion in self._criteria]  # each sees every token
            finish = finish or ("stop" if any(answers) else None)
        if not stopped and (finish or state.left <= 0):
            finish = finish or "length"
            rest, stopped = state.stops.push(state.detokenizer.flush())
            piece += rest + ("" if stopped else state.stops.flush())
        return piece, "stop" if stopped else finish


def _origin(draft: Draft, verdict: Verdict) -> Origin:
    """Origin of the token that the target adds itself."""
    if not draft.tokens:
        return "plain"
    return "correction" if (verdict.path[-1] if verdict.path else 0) in draft.parents else "bonus"
