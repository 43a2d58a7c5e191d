"""The reasoning that a model writes before its answer: markers of each model family, and parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.chat import harmony
from paceline.chat.harmony import HarmonyParser
from paceline.sampling.lark import text_expression
from paceline.sampling.thinking import ThinkingBudget
from paceline.text.growing import overlap
from paceline.text.template_text import TemplateText


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """A format of reasoning, with a marker at its start and its end."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see, even if they are special tokens."""
        return self.start, self.end

    def known(self, template: str) -> bool:
        """Return True if a chat template belongs to a model that writes this format."""
        return self.end in template

    def parser(self, inside: bool) -> ThoughtParser | HarmonyParser:
        """Return a parser for a reply. `inside`: True if the prompt ends inside the reasoning."""
        return ThoughtParser(self, inside)

    def begun(self, prompt: str) -> bool:
        """Return True if a prompt ends inside the reasoning."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def over(self, prompt: str) -> bool:
        """Return True if a prompt ends after complete reasoning. Templates write empty reasoning to turn it off."""
        return prompt.rstrip().endswith(self.end)

    def skip(self, prompt: str) -> str:
        """Return the prompt with complete, empty reasoning at its end, so that the reply begins with the answer."""
        if self.over(prompt):
            return prompt
        start, end = map(TemplateText.written, (self.start, f"\n\n{self.end}\n\n"))
        return (prompt.rstrip() if self.begun(prompt) else prompt + start) + end

    def reasoning(self, inside: bool) -> tuple[str, str]:
        """Return `Sampling.reasoning` for a reply. `inside`: True if the prompt ends inside the reasoning."""
        return "" if inside else self.start, self.end

    def budget(self, tokens: int, inside: bool) -> ThinkingBudget:
        """Return `Sampling.thinking_budget` for a reply.

        Args:
            tokens: Maximum number of tokens of reasoning.
            inside: True if the prompt ends inside the reasoning.
        """
        return ThinkingBudget(tokens, *self.reasoning(inside))

    def rules(self, inside: bool, special: Mapping[str, int]) -> str:
        """Return rules of a Lark grammar for an `answer` with reasoning before it.

        Args:
            inside: True if the prompt ends inside the reasoning. Otherwise, reasoning is optional.
            special: Ids of the markers that are special tokens.
        """
        if self.end in special:
            body = f"body: /(.|\\n)*/ {text_expression(self.end, special)}"
        else:
            body = f"body[suffix={text_expression(self.end, special)}]: /(.|\\n)*/"
        before = "body" if inside else f"{text_expression(self.start, special)} body"
        space = "/\\n{0,2}/"  # a limit, because a small model may write white space forever
        return f"start: thought{'' if inside else '?'} answer\nthought: {before} {space}\n{body}\n"


class _Harmony(ThoughtFormat):
    """The channels of gpt-oss. Replies are always split, because without the markers, reasoning and answer look the
    same."""

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
    """The reasoning channel of Gemma 4."""

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


def thought_format_of(template: str | None) -> ThoughtFormat | None:
    """Return the reasoning format that a chat template uses. None if the model does not reason."""
    return next((form for form in _FORMATS if form.known(template or "")), None)


class ThoughtParser:
    """Splits a growing reply into reasoning and the rest. White space around the reasoning is dropped.

    Attributes:
        inside: True while the text is reasoning.
    """

    def __init__(self, form: ThoughtFormat, inside: bool) -> None:
        self._form, self.inside = form, inside
        self._open = True
        """True if reasoning may still begin."""
        self._held = ""
        self._fresh = True
        """True while white space is dropped, until other text follows."""

    def push(self, text: str) -> tuple[str, str]:
        """Add text of the reply. Return the reasoning and the text of the answer that can be shown."""
        self._held += text
        if self._open and not self.inside:
            self._begin()
        thought = self._think() if self.inside else ""
        return thought, "" if self._open else self._answer()

    def flush(self) -> tuple[str, str]:
        """End the reply. Return the reasoning or the text that was held back because it might have been a marker."""
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
