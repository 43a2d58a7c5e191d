"""Replies to chats, as they grow: reasoning, text and function calls, which each API writes in its own shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.server.calls import Call, CallParser, ForcedCallParser, ReasonedCalls
from paceline.server.choices import FINISH_REASONS
from paceline.server.harmony import HarmonyParser
from paceline.server.thinking import ThoughtParser
from paceline.server.worker import ReplyRound


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyText:
    """More of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More arguments of the last call."""

    text: str


Part = Reasoning | ReplyText | Call | Arguments


@dataclass(slots=True, kw_only=True)
class ChatReply:
    """One reply to a chat as far as its rounds have been added.

    `parser`: None if no tool may be called. `thoughts`: None if the reasoning is not split off. `reasoned`: reads calls
    in reasoning that never ends. `markers`: special tokens that the parsers must see, and the texts they stand for.
    `finish_reason`: OpenAI's; `stop`: the stop string that ended the reply.
    """

    parser: CallParser | ForcedCallParser | None = None
    thoughts: ThoughtParser | HarmonyParser | None = None
    reasoned: ReasonedCalls | None = None
    markers: Mapping[int, str] = field(default_factory=dict)
    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the reply must be a call."""
        return isinstance(self.parser, ForcedCallParser)

    def add(self, round_: ReplyRound) -> list[Part]:
        """Add a round, and return its parts."""
        thought, text = self._split(round_)
        last = round_.chunks[-1]
        calls: Sequence[Call] = ()
        if self.reasoned and self.thoughts:
            thought, calls = self.reasoned.push(thought, self.thoughts.inside, last.finish_reason)
        parts: list[Part] = [Reasoning(thought)] if thought else []
        parts += [*self._parse(text, over=last.finish_reason is not None), *calls]
        for part in parts:
            self._keep(part)
        if last.finish_reason:
            self.stop, self.finish_reason = last.stop, self._finish(last.finish_reason)
        return parts

    def _split(self, round_: ReplyRound) -> tuple[str, str]:
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

    def _parse(self, text: str, over: bool) -> list[Part]:
        if self.parser is None:
            return [ReplyText(text)] if text else []
        shown, pieces = self.parser.push(text)
        rest, last = self.parser.flush() if over else ("", [])
        found = [Arguments(piece) if isinstance(piece, str) else piece for piece in (*pieces, *last)]
        return [*([ReplyText(shown + rest)] if shown + rest else []), *found]

    def _keep(self, part: Part) -> None:
        match part:
            case Reasoning():
                self.reasoning += part.text
            case ReplyText():
                self.text += part.text
            case Arguments():
                self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + part.text)
            case Call():
                self.calls.append(part)

    def _finish(self, reason: str) -> str:
        incomplete = isinstance(self.parser, ForcedCallParser) and not self.parser.complete
        if self.calls and reason != "length" and not incomplete:
            return "tool_calls"
        return FINISH_REASONS.get(reason, reason)
