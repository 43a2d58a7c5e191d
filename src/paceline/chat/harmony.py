"""Harmony, the chat format of gpt-oss: a reply is a sequence of messages in channels for reasoning, calls and text.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: OpenAI's description of the format (github.com/openai/harmony).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

CHANNEL, MESSAGE, END, START, CALL, RETURN = MARKERS = (
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>"),
)
FINAL = f"{CHANNEL}final{MESSAGE}"
"""Header of the message that holds the answer."""

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_BEGINNINGS = (CHANNEL, "to=")


def rules(special: Mapping[str, int]) -> str:
    """Return rules of a Lark grammar for an `answer` in the final channel, with optional reasoning before it.

    Args:
        special: Ids of the markers that are special tokens.
    """
    names = {marker: f"<[{special[marker]}]>" if marker in special else json.dumps(marker) for marker in MARKERS}
    return (
        f'start: thought? {names[CHANNEL]} "final" {names[MESSAGE]} answer\n'
        f'thought: {names[CHANNEL]} "analysis" {names[MESSAGE]} /(.|\\n)*/ {names[END]} {names[START]} "assistant"\n'
    )


class HarmonyParser:
    """Splits a growing reply into reasoning and the rest. Calls are rewritten in the Hermes format.

    Every marker is one token, so it never arrives in parts. A reply that does not begin with a header continues an
    answer.

    Attributes:
        inside: True while the text is reasoning.
    """

    def __init__(self) -> None:
        self.inside = False
        self._held = ""
        self._began = False
        self._tail: str | None = None
        """Text to add after the current message. None while a header is read."""
        self._opening, self._answered = "", False

    def push(self, text: str) -> tuple[str, str]:
        """Add text of the reply. Return the reasoning and the text of the answer that can be shown."""
        self._held += text
        thought = answer = ""
        while self._held and (self._tail is not None or self._header()):
            opening, self._opening = self._opening, ""
            body, found, self._held = self._body()
            if self.inside:
                thought += body
            else:
                answer += opening + body + (self._tail or "" if found else "")
                self._answered = self._answered or bool(answer.strip())
            if found:
                self._tail, self.inside = None, False
        return thought, answer

    def flush(self) -> tuple[str, str]:
        """End the reply. Return no reasoning, and text that was held back. An incomplete header is dropped."""
        held, self._held = self._held, ""
        return "", "" if self._began else held

    def _header(self) -> bool:
        """Read a message's header. Return False if it is not complete yet."""
        head = self._held.lstrip()
        if not self._began and not any(head.startswith(x) or x.startswith(head) for x in _BEGINNINGS):
            self._began, self._tail = True, ""
            return True
        header, found, body = self._held.partition(MESSAGE)
        self._began = self._began or head.startswith(_BEGINNINGS)
        if not found:
            return False
        self._held = body
        if recipient := _RECIPIENT.search(header):
            self._opening = f'<tool_call>\n{{"name": {json.dumps(recipient[1])}, "arguments": '
            self._tail = "}\n</tool_call>"
        else:
            self.inside, self._tail = f"{CHANNEL}analysis" in header, ""
            self._opening = "\n\n" if self._answered and not self.inside else ""
        return True

    def _body(self) -> tuple[str, bool, str]:
        """Return the text of the message, True if the message ends after it, and the rest of the reply."""
        ends = [(at, marker) for marker in (END, CALL, RETURN) if (at := self._held.find(marker)) >= 0]
        if not ends:
            return self._held, False, ""
        at, marker = min(ends)
        return self._held[:at], True, self._held[at + len(marker) :]
