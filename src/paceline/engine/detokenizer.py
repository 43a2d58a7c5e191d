"""From tokens to text as it grows: whole characters, stop strings, the end of a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.sampling.parameters import Sampling, StopWhen
from paceline.sampling.sampler import Prefix
from paceline.types import FinishReason, Verdict

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
    """How likely the model held a token, before any penalty, ban, temperature or cut; natural logarithms.

    `chosen`: of the token itself. `top`: (token id, log-probability) of the likeliest tokens, likeliest first; the
    chosen one is among them if it is that likely.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token of a reply as it arrives. The texts of all chunks, joined, are the reply's text.

    `text` may be empty (part of a character, or held back because a stop string may begin there) or hold what was
    held back before. `finish_reason`: on the last chunk only. `logprobs`: if asked for.
    """

    text: str
    token_id: int
    origin: Origin
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None

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
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        if not text.endswith(_BROKEN) and len(text) > len(self._shown):
            return self._show(text, 0)
        if not self._decode([token, token]):
            # `decode` leaves out special tokens. Asked for two, since it may also strip the first space of a text.
            self._window.pop()
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
    """Lets text through up to the first stop string, holding back whatever may turn out to begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string is complete)."""
        self._held += text
        hits = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            safe, self._held = self._held[: min(hits)], ""
            return safe, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        safe, self._held = self._held, ""
        return safe


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Criteria:
    """The user's own reasons to end a reply, asked after each token."""

    def __init__(self, functions: StopWhen | Sequence[StopWhen]) -> None:
        self._functions = (functions,) if callable(functions) else functions
        self._ids: list[int] = []
        self._text = ""

    def push(self, token: int, text: str) -> bool:
        """Whether the reply ends with this token, which completes `text`. Every function sees every token."""
        if not self._functions:
            return False
        self._ids.append(token)
        self._text += text
        answers = [wants_to(self._ids, self._text) for wants_to in self._functions]
        return any(answers)


class TextStream:
    """A reply as it grows: cuts each verdict where the reply ends, and turns it into chunks."""

    def __init__(self, sampling: Sampling, eos: Sequence[int], decode: Decode, room: int) -> None:
        """`room`: tokens that the context has left for the reply; `eos`: the model's end-of-sequence tokens."""
        self._ends: dict[int, FinishReason] = {} if sampling.ignore_eos else dict.fromkeys(eos, "eos")
        self._ends.update(dict.fromkeys(sampling.stop_token_ids, "stop"))
        self.left = min(sampling.max_new_tokens, room)
        self._text = Detokenizer(decode)
        self._stops = StopStrings(tuple(sampling.stop))
        self._pieces: list[str] = []
        self._criteria = Criteria(sampling.stop_when)
        self.logprobs = sampling.logprobs

    def trim(self, verdict: Verdict, prefix: Prefix) -> Verdict:
        """The verdict up to the first token that ends the reply: EOS, a stop token or string, a criterion of the
        user's, the length limit."""
        self._pieces = []
        for count, token in enumerate(verdict.tokens, 1):
            finish = self._take(token)
            if finish:
                return verdict.cut(count, finish)
        return verdict

    def emit(self, verdict: Verdict, logits: Tensor, own: Origin = "plain") -> list[Chunk]:
        """The chunks of the verdict trimmed last. `logits` [T, V]: of the round's rows. `own`: where the token comes
        from that the target added."""
        last = len(verdict.tokens) - 1
        logprobs = self._report(verdict, logits)
        return [
            Chunk(
                piece,
                token,
                "draft" if i < len(verdict.path) else own,
                verdict.finish if i == last else None,
                logprobs[i],
            )
            for i, (piece, token) in enumerate(zip(self._pieces, verdict.tokens, strict=True))
        ]

    def _report(self, verdict: Verdict, logits: Tensor) -> Sequence[Logprobs | None]:
        """Each token comes from the row before it: the first from row 0, the next from the first accepted row."""
        if self.logprobs is None:
            return [None] * len(verdict.tokens)
        rows = [0, *verdict.path][: len(verdict.tokens)]
        logp = logits[rows].log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(verdict.tokens, device=logp.device)[:, None])[:, 0].tolist()
        values, ids = (x.tolist() for x in logp.topk(self.logprobs, -1))
        tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        return [Logprobs(*pair) for pair in zip(chosen, tops, strict=True)]

    def _take(self, token: int) -> FinishReason | None:
        self.left -= 1
        finish = self._ends.get(token)
        text = "" if finish else self._text.push(token)
        piece, stopped = self._stops.push(text)
        if self._criteria.push(token, text):
            finish = finish or "stop"
        if not stopped and (finish or self.left == 0):
            finish = finish or "length"
            rest, stopped = self._stops.push(self._text.flush())
            piece += rest + ("" if stopped else self._stops.flush())
        self._pieces.append(piece)
        return "stop" if stopped else finish
