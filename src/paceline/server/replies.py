"""Replies as they grow: blocks of reasoning, text and function calls, which each API writes in its own shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.chat.calls import Call, CallParser, ForcedCallParser, Piece, ReasonedCalls
from paceline.chat.harmony import HarmonyParser
from paceline.chat.thinking import ThoughtParser
from paceline.server.worker import FINISH_REASONS, ReplyRound


@dataclass(slots=True, eq=False)
class ReplyBlock:
    """A part of a reply.

    Attributes:
        kind: The kind of the part.
        index: The position among the reply's blocks.
        text: The text so far. Of a call, the arguments as JSON.
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
    """More text of the last block."""

    block: ReplyBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The last block is complete: another begins, or the reply ends."""

    block: ReplyBlock


BlockEvent = BlockBegun | BlockGrown | BlockEnded


@dataclass(slots=True, kw_only=True)
class ChatReply:
    """One reply as far as its rounds have been added.

    Attributes:
        parser: The parser of calls. None if no tool may be called.
        thoughts: The parser of reasoning. None if reasoning is part of the text.
        reasoned: The parser of calls within reasoning that never ends.
        markers: Special tokens that the parsers must see, and their texts.
        blocks: The blocks so far.
        open: True if the last block may grow.
        reasoning_tokens: Tokens of reasoning so far.
        finish_reason: OpenAI's finish reason, once the reply has ended.
        stop: The stop string that ended the reply.
    """

    parser: CallParser | ForcedCallParser | None = None
    thoughts: ThoughtParser | HarmonyParser | None = None
    reasoned: ReasonedCalls | None = None
    markers: Mapping[int, str] = field(default_factory=dict)
    blocks: list[ReplyBlock] = field(default_factory=list)
    open: bool = False
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def forced(self) -> bool:
        """True if the reply must be a call."""
        return isinstance(self.parser, ForcedCallParser)

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
        if self.reasoned and self.thoughts:
            thought, calls = self.reasoned.push(thought, self.thoughts.inside, last.finish_reason)
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
        thoughts = self.thoughts
        if thoughts is None:
            return "", "".join(pieces)
        thought, text = "", ""
        for piece in pieces:
            began = thoughts.inside
            new_thought, new_text = thoughts.push(piece)
            self.reasoning_tokens += began or thoughts.inside or bool(new_thought)
            thought, text = thought + new_thought, text + new_text
        rest = thoughts.flush() if round_.chunks[-1].finish_reason else ("", "")
        return thought + rest[0], text + rest[1]

    def _parse_calls(self, text: str, over: bool) -> tuple[str, Sequence[Piece]]:
        """Return (text that can be shown, pieces of calls)."""
        if self.parser is None:
            return text, ()
        shown, pieces = self.parser.push(text)
        rest, last = self.parser.flush() if over else ("", [])
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
        incomplete = isinstance(self.parser, ForcedCallParser) and not self.parser.complete
        if self.calls and reason != "length" and not incomplete:
            return "tool_calls"
        return FINISH_REASONS.get(reason, reason)
