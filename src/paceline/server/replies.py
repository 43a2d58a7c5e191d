"""Replies as they grow: blocks of reasoning, text and calls; token texts and log-probabilities; token counts.

Each API writes them in its own shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any, Literal

from paceline.chat.calls import Call, CallParser, ForcedCallParser, Piece, ReasonedCalls
from paceline.chat.harmony import HarmonyParser
from paceline.chat.thinking import ThoughtParser
from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.engine.stats import Stats
from paceline.server.worker import FINISH_REASONS, ReplyRound
from paceline.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class ReplyBlock:
    """A part of a reply.

    Attributes:
        kind: "reasoning", "text" or "call".
        index: The position among the reply's blocks.
        text: The text so far. In a call, the arguments as JSON, which is incomplete if a forced call is cut off.
        name: The function of a call.
        id: The id of a call.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    id: str | None = None

    @property
    def call(self) -> dict[str, Any]:
        """A call in OpenAI's shape."""
        return Call(self.name, self.text, self.id).as_dict()


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """A new block. `text`: its beginning, which may be empty in a call."""

    block: ReplyBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """More text of the last block. A call only grows if it is forced (see `chat.calls`)."""

    block: ReplyBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The last block is complete: another begins, or the reply ends."""

    block: ReplyBlock


BlockEvent = BlockBegun | BlockGrown | BlockEnded


@dataclass(slots=True, kw_only=True)
class ChatReply:
    """One reply, as far as its rounds have been added.

    Attributes:
        call_parser: The parser of calls. None if no tool may be called.
        thought_parser: The parser of reasoning. None if reasoning is part of the text.
        unclosed_thought_calls: The parser of calls within reasoning that never ends.
        markers: Special token -> its text, for the special tokens that the parsers must see.
        blocks: The blocks so far.
        open: True if the last block may grow.
        reasoning_tokens: Tokens of reasoning so far.
        finish_reason: OpenAI's finish reason, once the reply has ended.
        stop: The stop string that ended the reply.
    """

    call_parser: CallParser | ForcedCallParser | None = None
    thought_parser: ThoughtParser | HarmonyParser | None = None
    unclosed_thought_calls: ReasonedCalls | None = None
    markers: Mapping[int, str] = field(default_factory=dict)
    blocks: list[ReplyBlock] = field(default_factory=list)
    open: bool = False
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def forced(self) -> bool:
        """True if the reply must be a call."""
        return isinstance(self.call_parser, ForcedCallParser)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[ReplyBlock]:
        """The calls so far."""
        return [block for block in self.blocks if block.kind == "call"]

    def add(self, round_: ReplyRound) -> list[BlockEvent]:
        """Add a round, and return its events."""
        thought, text = self._split_reasoning(round_)
        last = round_.chunks[-1]
        calls: Sequence[Call] = ()
        if self.unclosed_thought_calls and self.thought_parser:
            inside = self.thought_parser.inside
            thought, calls = self.unclosed_thought_calls.push(thought, inside, last.finish_reason)
        shown, pieces = self._parse_calls(text, over=last.finish_reason is not None)
        events = [*self._extend("reasoning", thought), *self._extend("text", shown)]
        for piece in (*pieces, *calls):
            if isinstance(piece, Call):
                events += self._begin("call", piece.arguments, piece.name, piece.id)
            else:
                events += self._extend("call", piece)
        if last.finish_reason:
            self.stop, self.finish_reason = last.stop, self._finish(last.finish_reason)
            events += self._end()
        return events

    def _split_reasoning(self, round_: ReplyRound) -> tuple[str, str]:
        """Return the round's (reasoning, text after it)."""
        pieces = [chunk.text + self.markers.get(chunk.token_id, "") for chunk in round_.chunks]
        parser = self.thought_parser
        if parser is None:
            return "", "".join(pieces)
        thought, text = "", ""
        for piece in pieces:
            began = parser.inside
            new_thought, new_text = parser.push(piece)
            self.reasoning_tokens += began or parser.inside or bool(new_thought)
            thought, text = thought + new_thought, text + new_text
        rest = parser.flush() if round_.chunks[-1].finish_reason else ("", "")
        return thought + rest[0], text + rest[1]

    def _parse_calls(self, text: str, over: bool) -> tuple[str, Sequence[Piece]]:
        """Return (text that can be shown, pieces of calls)."""
        if self.call_parser is None:
            return text, ()
        shown, pieces = self.call_parser.push(text)
        rest, last = self.call_parser.flush() if over else ("", [])
        return shown + rest, [*pieces, *last]

    def _extend(self, kind: Literal["reasoning", "text", "call"], text: str) -> list[BlockEvent]:
        """Add text to the last block, or to a new one if the last is of another kind."""
        if not text:
            return []
        if not self.open or self.blocks[-1].kind != kind:
            return self._begin(kind, text)
        self.blocks[-1].text += text
        return [BlockGrown(self.blocks[-1], text)]

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], text: str, name: str = "", call_id: str | None = None
    ) -> list[BlockEvent]:
        events = self._end()
        self.blocks.append(ReplyBlock(kind, len(self.blocks), text, name, call_id))
        self.open = True
        return [*events, BlockBegun(self.blocks[-1], text)]

    def _end(self) -> list[BlockEvent]:
        was_open, self.open = self.open, False
        return [BlockEnded(self.blocks[-1])] if was_open else []

    def _finish(self, reason: str) -> str:
        incomplete = isinstance(self.call_parser, ForcedCallParser) and not self.call_parser.complete
        if self.calls and reason != "length" and not incomplete:
            return "tool_calls"
        return FINISH_REASONS.get(reason, reason)


_MIN_LOGPROB = -9999.0
"""OpenAI's value for a log-probability of minus infinity, which JSON cannot express."""


class TokenTexts:
    """Tokens of a model as text and bytes, in the shapes of OpenAI's API."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _names(self) -> dict[int, str]:
        return {index: name for name, index in self._tokenizer.vocabulary.items()}

    def bytes(self, token: int) -> bytes:
        """Return a token's bytes. For a special token, this is its name. For an unused row of the vocabulary, it is
        empty."""
        found = self._tokenizer.token_bytes.get(token)
        return self._names.get(token, "").encode(errors="replace") if found is None else found

    def text(self, token: int) -> str:
        """Return a token's bytes as text."""
        return self.bytes(token).decode(errors="replace")

    def chat_logprobs(self, chunk: Chunk) -> dict[str, Any]:
        """Return one token's log-probabilities in the shape of chats."""
        logprobs = logprobs_of(chunk)
        top = [self._entry(token, logprob) for token, logprob in logprobs.top]
        return {**self._entry(chunk.token_id, logprobs.chosen), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(self.bytes(token))}

    def text_logprobs(self, chunks: Sequence[Chunk], offset: int) -> dict[str, Any]:
        """Return log-probabilities in the shape of completions, null for a prompt's first token.

        `offset`: Number of characters of the text before the first chunk.
        """
        offsets = []
        for chunk in chunks:
            offsets.append(offset)
            offset += len(chunk.text)
        return {
            "tokens": [self.text(chunk.token_id) for chunk in chunks],
            "token_logprobs": [chunk.logprobs and max(chunk.logprobs.chosen, _MIN_LOGPROB) for chunk in chunks],
            "top_logprobs": [self._top(chunk) for chunk in chunks],
            "text_offset": offsets,
        }

    def _top(self, chunk: Chunk) -> dict[str, float] | None:
        """The most likely tokens and the chosen token."""
        if not chunk.logprobs or not chunk.logprobs.top:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*chunk.logprobs.top, (chunk.token_id, chunk.logprobs.chosen)):
            found.setdefault(self.text(token), max(logprob, _MIN_LOGPROB))
        return found


def logprobs_of(chunk: Chunk) -> Logprobs:
    """Return the log-probabilities of a token that was generated with them."""
    assert chunk.logprobs is not None
    return chunk.logprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts over all replies to a request.

    Attributes:
        prompt: Tokens of the prompts.
        written: Tokens of the replies.
        stats: Statistics of each reply.
        cached: Tokens of the prompts that came from the prefix cache.
        drafter: The drafter's name. None for plain decoding.
        queued: Seconds from submission until a reply had a slot.
        first: Seconds from submission until a reply had its first token.
        total: Seconds from submission until all replies had ended.
        read: Tokens of the prompts read so far.
    """

    prompt: int
    written: int
    stats: Sequence[Stats]
    cached: int = 0
    drafter: str | None = None
    queued: float = 0.0
    first: float = 0.0
    total: float = 0.0
    read: int = 0

    def openai(self, reasoning: int = 0) -> dict[str, Any]:
        """Return OpenAI's token counts, and the statistics of speculation. `reasoning`: tokens of the reasoning."""
        details = {**({"reasoning_tokens": reasoning} if reasoning else {}), **self._predicted()}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": details} if details else {}),
            "speculation": self.speculation(),
        }

    def _predicted(self) -> dict[str, int]:
        """Return the counts of predicted tokens that the replies accepted and rejected; {} without a prediction."""
        predicted, accepted = sum(s.predicted for s in self.stats), sum(s.confirmed for s in self.stats)
        if not predicted:
            return {}
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}

    @property
    def rounds(self) -> int:
        """Rounds of all replies."""
        return sum(each.rounds for each in self.stats)

    @property
    def _accepted_at(self) -> list[int]:
        return [sum(counts) for counts in zip_longest(*(each.accepted_at for each in self.stats), fillvalue=0)]

    def speculation(self) -> dict[str, Any]:
        """Return the statistics of speculation."""
        return {
            "rounds": self.rounds,
            "drafted": sum(each.drafted for each in self.stats),
            "accepted": sum(each.accepted for each in self.stats),
            "accepted_at": self._accepted_at,
            "drafter": self.drafter,
            "tokens_per_round": round(self.written / self.rounds, 4) if self.rounds else 0.0,
        }

    def prompt_progress(self) -> dict[str, int]:
        """Return how much of the prompts has been read, as llama.cpp's server does for `return_progress`."""
        milliseconds = round(1000 * self.total)
        return {"total": self.prompt, "cache": self.cached, "processed": self.read, "time_ms": milliseconds}

    def vllm(self) -> dict[str, Any]:
        """Return the statistics of speculation in the shape of vLLM's `metrics` (`--per-request-spec-decode-metrics`).

        `acceptance_histogram[i]`: rounds in which i drafted tokens were accepted.
        """
        drafted, accepted = sum(each.drafted for each in self.stats), sum(each.accepted for each in self.stats)
        histogram = [more - deeper for more, deeper in pairwise([self.rounds, *self._accepted_at, 0])]
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / self.rounds if self.rounds else 0.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": histogram,
                "num_spec_steps": self.rounds,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
            }
        }
