"""Reasoning that a model writes before its answer: the markers of its family, and a parser that splits it off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.chat import harmony
from paceline.chat.harmony import HarmonyParser
from paceline.sampling.lark import literal
from paceline.sampling.thinking import ThinkingBudget
from paceline.text.growing import overlap
from paceline.text.template_text import TemplateText


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """Markers around the reasoning."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """What the parser must see, also where it is a special token."""
        return self.start, self.end

    def known(self, template: str) -> bool:
        """Return True if a chat template is of a model that writes this format."""
        return self.end in template

    def parser(self, inside: bool) -> ThoughtParser | HarmonyParser:
        """Return a parser of a reply to a prompt that ends `inside` of the reasoning, or not."""
        return ThoughtParser(self, inside)

    def begun(self, prompt: str) -> bool:
        """Return True if a prompt ends inside of the reasoning."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def over(self, prompt: str) -> bool:
        """Return True if a prompt ends with reasoning that is over, as templates write it where none is wanted."""
        return prompt.rstrip().endswith(self.end)

    def skip(self, prompt: str) -> str:
        """Return the prompt with reasoning that is over at its end."""
        if self.over(prompt):
            return prompt
        start, end = map(TemplateText.written, (self.start, f"\n\n{self.end}\n\n"))
        return (prompt.rstrip() if self.begun(prompt) else prompt + start) + end

    def reasoning(self, inside: bool) -> tuple[str, str]:
        """Return `Sampling.reasoning` of a reply to a prompt that ends `inside` of the reasoning, or not."""
        return "" if inside else self.start, self.end

    def budget(self, tokens: int, inside: bool) -> ThinkingBudget:
        """Return `Sampling.thinking_budget` of a reply to a prompt that ends `inside` of the reasoning, or not."""
        return ThinkingBudget(tokens, *self.reasoning(inside))

    def rules(self, inside: bool, special: Mapping[str, int]) -> str:
        """Return rules of a Lark grammar for an `answer` that reasoning may precede, or follows if the prompt ends
        `inside` of it. `special`: ids of the markers that are special tokens.
        """
        if self.end in special:
            body = f"body: /(.|\\n)*/ {literal(self.end, special)}"
        else:
            body = f"body[suffix={literal(self.end, special)}]: /(.|\\n)*/"
        before = "body" if inside else f"{literal(self.start, special)} body"
        space = "/\\n{0,2}/"  # no more: a small model that may write white space may write nothing else
        return f"start: thought{'' if inside else '?'} answer\nthought: {before} {space}\n{body}\n"


class _Harmony(ThoughtFormat):
    """gpt-oss's channels, which are split whatever is asked for: without their markers they could not be told apart."""

    markers = harmony.MARKERS

    def known(self, template: str) -> bool:
        return self.start in template and harmony.MESSAGE in template

    def parser(self, inside: bool) -> HarmonyParser:
        return HarmonyParser()

    def over(self, prompt: str) -> bool:
        return prompt.endswith(harmony.FINAL)

    def skip(self, prompt: str) -> str:
        return prompt if self.over(prompt) else prompt + TemplateText.written(harmony.FINAL)

    def reasoning(self, inside: bool) -> tuple[str, str]:
        return harmony.CHANNEL, harmony.FINAL

    def budget(self, tokens: int, inside: bool) -> ThinkingBudget:
        final = f"{harmony.END}{harmony.START}assistant{harmony.FINAL}"
        return ThinkingBudget(tokens, f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END, final)

    def rules(self, inside: bool, special: Mapping[str, int]) -> str:
        return harmony.rules(special)


class _Gemma(ThoughtFormat):
    """Gemma 4's channel."""

    markers = ("<|channel>", "<channel|>")

    def skip(self, prompt: str) -> str:
        if self.over(prompt):
            return prompt
        return prompt.removesuffix(self.start) + TemplateText.written(self.start + self.end)


HARMONY = _Harmony(harmony.CHANNEL, harmony.END)
_FORMATS = (
    HARMONY,
    _Gemma("<|channel>thought\n", "<channel|>"),
    ThoughtFormat("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, Phi-4, GLM
    ThoughtFormat("[THINK]", "[/THINK]"),  # Magistral
    ThoughtFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B
    ThoughtFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)


def family(template: str | None) -> ThoughtFormat | None:
    """Return the format that a chat template uses, None for models that do not reason."""
    return next((form for form in _FORMATS if form.known(template or "")), None)


class ThoughtParser:
    """Splits a growing reply into reasoning and the rest. White space around the reasoning is dropped.

    `inside`: True while the text is reasoning.
    """

    def __init__(self, form: ThoughtFormat, inside: bool) -> None:
        self._form, self.inside = form, inside
        self._open = True
        """True if reasoning may still begin."""
        self._held = ""
        self._fresh = True
        """True if white space is dropped until other text follows."""

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, text of the answer) that can be shown."""
        self._held += text
        if self._open and not self.inside:
            self._begin()
        thought = self._think() if self.inside else ""
        return thought, "" if self._open else self._answer()

    def flush(self) -> tuple[str, str]:
        """Return what was held back for a marker that did not come."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.inside else ("", held)

    def _begin(self) -> None:
        head = self._held.lstrip()
        if head.startswith(self._form.start):
            self._held, self.inside = head.removeprefix(self._form.start), True
        elif not self._form.start.startswith(head):
            self._open = self._fresh = False

    def _think(self) -> str:
        held = self._held.lstrip() if self._fresh else self._held
        thought, found, after = held.partition(self._form.end)
        if found:
            self._held, self.inside, self._open, self._fresh = after, False, False, True
            return thought.rstrip()
        shown = held[: len(held) - overlap(held, self._form.end)].rstrip()
        self._held, self._fresh = held[len(shown) :], self._fresh and not shown
        return shown

    def _answer(self) -> str:
        text = self._held.lstrip() if self._fresh else self._held
        self._held, self._fresh = "", self._fresh and not text
        return text
