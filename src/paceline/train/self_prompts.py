"""Prompts that the target makes itself, for whoever has none.

A chat model was taught on whole chats. Given its template up to where the user's words begin, it writes what a user
would say (Magpie: Xu et al., "Alignment data synthesis from scratch by prompting aligned LLMs with nothing",
arXiv 2406.08464). Half of the time the user's first words are given, so that the prompts are about as many things as
people ask for; left alone, a small model rarely thinks of a text to be summarised or translated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.engine.results import Completion
from paceline.errors import InvalidOption, InvalidPrompt, UnsupportedModel
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.text.tokenizer import Tokenizer
from paceline.train.answers import seed_of
from paceline.train.jsonl import Journal, JsonLines, made_with
from paceline.train.progress import OnProgress, Progress, ignore
from paceline.train.prompts import parse_prompt
from paceline.train.writing import survivors

SHORTEST, LONGEST = 4, 384
"""Tokens of a prompt, its end not counted. One that goes on is taken for unfinished."""

GROUP = 4
"""Texts made in one go, in widths of it; a kill loses no more."""

TRIES = 50
"""Texts made per prompt of use, before giving up."""

OPENINGS = (
    "Write a Python function",
    "Write a",
    "Imagine that you are",
    "Explain",
    "Summarize the following article:\n\nThe",
    "How many",
    "Write code",
    "What",
    "Translate this German sentence into English: Die",
    "Fix the bug in this code:\n\n```",
    "Give me",
    "Use this passage to answer the question below.\n\nPassage: In",
    "Create a",
    "Who",
    "Summarize this text in two sentences:\n\nA",
    "Compare",
    "List",
    "Translate this text from German: Ein",
    "Rewrite this",
    "Extract from the following text",
)
"""How every other user begins, in turn."""

_WORDS = "these are the words of the user"


def write_prompts(
    llm: LLM, path: Path, count: int, *, seed: int = 0, width: int = 24, on_progress: OnProgress = ignore
) -> Progress:
    """Let the target write `count` different prompts, as rows {"id", "prompt"} of `path`; returns what was done.

    Sampled at temperature 1, each text from a seed of its own, so that the file depends on the model and `seed` alone:
    a run that was interrupted goes on where it stopped, and a larger `count` continues a smaller one. Left out, and
    counted as skipped, is what is empty, too short, unfinished, or was said before in other case or spacing. Raises
    `UnsupportedModel` for a model without a usable chat template, or that writes too little of use; `InvalidData` where
    the file was made with other options; `OSError`.
    """
    if count < 1 or width < 1:
        raise InvalidOption(f"{count} prompts, {width} at once, are not possible", "Give 1 or more")
    turn = Turn.of(llm.tokenizer)
    model = {"model": llm.model.path.name, "tokenizer": llm.tokenizer.digest}
    made_with(path, model | {"openings": list(OPENINGS), "seed": seed})
    with Journal(path) as journal:
        writer = _PromptWriter(llm, turn, journal, seed, Progress(count), on_progress)
        JsonLines(path, writer.recall)
        while writer.progress.done < count:
            writer.write(GROUP * width, width)
    return writer.progress


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's turn in a chat: the tokens before it, and what ends it besides EOS."""

    before: tuple[int, ...]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer) -> Turn:
        """As the chat template has it. Raises `UnsupportedModel` where that says nothing."""
        try:
            chat = tokenizer.apply_chat_template([{"role": "user", "content": _WORDS}])
        except InvalidPrompt as error:
            raise UnsupportedModel(f"the model makes no prompts of its own: {error.cause}", _GIVE) from error
        before, found, after = chat.partition(_WORDS)
        ending = after.strip()
        if not found or not before or not ending:
            raise UnsupportedModel("the chat template has no beginning or no end of the user's words", _GIVE)
        ids, first = tokenizer.encode(before, special=False), tokenizer.encode(ending, special=False)[0]
        # An end that is one token can be told from the same characters in the text; any other cannot.
        special = first in tokenizer.special_ids
        return Turn(tuple(ids), () if special else (ending,), (first,) if special else ())

    def begin(self, number: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """The user's first words in text `number`, and the token ids that the model goes on from."""
        opening = OPENINGS[number // 2 % len(OPENINGS)] if number % 2 else ""
        return opening, [*self.before, *tokenizer.encode(opening, special=False)]

    def sampling(self, seed: int) -> Sampling:
        return Sampling(
            max_new_tokens=LONGEST + 1, temperature=1.0, seed=seed, stop=self.stop, stop_token_ids=self.stop_token_ids
        )


_GIVE = "Give prompts in a file, --prompts FILE"


@dataclass(slots=True)
class _PromptWriter:
    """Texts are numbered in the order in which they are tried; a number is the text's seed and the prompt's id.
    `said`: hashes of the prompts so far."""

    llm: LLM
    turn: Turn
    journal: Journal
    seed: int
    progress: Progress
    tell: OnProgress
    said: set[int] = field(default_factory=set)
    next: int = 0

    def recall(self, line: bytes, number: int) -> None:
        """A line that is in the file already."""
        prompt = parse_prompt(line, number)
        if not isinstance(prompt.id, int) or not isinstance(prompt.prompt, str):
            raise ValueError("this is no prompt that the model made")
        self.said.add(_meaning(prompt.prompt))
        self.next = prompt.id + 1
        self.progress.kept += 1

    def write(self, tries: int, width: int) -> None:
        """So many texts more, of which the useful ones are written in their order."""
        numbers = range(self.next, self.next + tries)
        begun = [self.turn.begin(number, self.llm.tokenizer) for number in numbers]
        completions = self._complete(numbers, [ids for _, ids in begun], width)
        for number, (opening, _), completion in zip(numbers, begun, completions, strict=True):
            if self.progress.done >= self.progress.total:
                return
            self._take(number, opening, completion)
        self.next += tries
        if self.progress.skipped > TRIES * (self.progress.written + GROUP):
            raise UnsupportedModel(
                f"of {self.progress.skipped + self.progress.written} texts that the model wrote for a user, "
                f"{self.progress.written} can be used",
                _GIVE,
            )

    def _complete(self, numbers: range, prompts: list[list[int]], width: int) -> list[Completion]:
        how = [self.turn.sampling(seed_of(self.seed, number)) for number in numbers]
        with self.llm.batch(prompts, how, width=width) as batch:
            for _ in survivors(batch):
                self.progress.tokens += 1
                self.tell(self.progress)
        return batch.completions

    def _take(self, number: int, opening: str, completion: Completion) -> None:
        text = (opening + completion.text).strip()
        if _whole(completion, self.llm.tokenizer.special_ids) and _meaning(text) not in self.said:
            self.said.add(_meaning(text))
            self.journal.append({"id": number, "prompt": text})
            self.progress.written += 1
        else:
            self.progress.skipped += 1


def _whole(completion: Completion, special: frozenset[int]) -> bool:
    """Whether it is a turn that ended, of a usable length and without another turn inside."""
    words = completion.token_ids[:-1]
    ended = completion.finish_reason in ("eos", "stop") and bool(completion.text.strip())
    return ended and len(words) >= SHORTEST and special.isdisjoint(words)


def _meaning(text: str) -> int:
    """The same for texts that differ in case and spacing only."""
    return seed_of(0, " ".join(text.casefold().split()))
