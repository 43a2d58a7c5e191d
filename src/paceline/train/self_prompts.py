"""Training prompts that the target writes itself, for users who have none.

A chat model was trained on whole chats. Given its chat template up to the beginning of the user's message, it writes a
message of a user (Magpie: Xu et al., "Alignment data synthesis from scratch by prompting aligned LLMs with nothing",
arXiv 2406.08464). For variety, every other message begins with an opening from a list. Without it, a small model rarely
asks for a summary or a translation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.engine.results import Completion
from paceline.errors import InvalidOption, InvalidPrompt, UnsupportedModel
from paceline.files.jsonl import Journal, JsonlFile, check_settings
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.text.tokenizer import Tokenizer
from paceline.train.answers import derive_seed
from paceline.train.prompts import parse_prompt
from paceline.train.writing import OnProgress, Progress, chunks_of

SHORTEST, LONGEST = 4, 384
"""Length of a usable prompt in tokens, without its end token. A longer prompt counts as unfinished."""

GROUP = 4
"""Texts per batch object, in multiples of its width. A kill loses at most one batch."""

TRIES = 50
"""Texts generated per usable prompt before giving up."""

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
"""First words of every other prompt, used in turn."""

_PLACEHOLDER = "these are the words of the user"


def write_prompts(
    llm: LLM,
    path: Path,
    count: int,
    *,
    seed: int = 0,
    width: int = 24,
    on_progress: OnProgress = lambda progress: None,
) -> Progress:
    """Let the target write different prompts, as rows {"id", "prompt"} of a JSONL file.

    Texts are sampled at temperature 1, each with its own seed, so the file depends only on the model and `seed`. An
    interrupted run continues where it stopped, and a larger `count` continues a smaller one. Texts are skipped, and
    counted as skipped, if they are empty, too short or unfinished, or if they differ from an earlier prompt only in
    case and spacing.

    Args:
        llm: The target.
        path: File to write or continue.
        count: Number of prompts in the file.
        seed: Seed of all texts.
        width: Batch size. It does not change the prompts.
        on_progress: Called after every token.

    Returns:
        The final progress.

    Raises:
        UnsupportedModel: If the model has no usable chat template, or writes too few usable texts.
        InvalidData: If the file was made with other options.
        OSError: If the file cannot be written.
    """
    if count < 1 or width < 1:
        raise InvalidOption(f"count and width must be >= 1, got {count} and {width}", "Use 5000 and 24, for example")
    turn = UserTurn.of(llm.tokenizer)
    model = {"model": llm.model.path.name, "tokenizer": llm.tokenizer.digest}
    check_settings(path, model | {"openings": list(OPENINGS), "seed": seed})
    with Journal(path) as journal:
        writer = _PromptWriter(llm, turn, journal, seed, Progress(count), on_progress)
        JsonlFile(path, writer.recall)
        while writer.progress.done < count:
            writer.write(GROUP * width, width)
    return writer.progress


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The user's turn in a chat template.

    Attributes:
        before: Token ids before the user's message.
        stop: Stop strings that end the message, in addition to EOS.
        stop_token_ids: Stop tokens that end the message, in addition to EOS.
    """

    before: tuple[int, ...]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer) -> UserTurn:
        """Find the user's turn in the chat template.

        Raises:
            UnsupportedModel: If the template does not show where a message begins and ends.
        """
        try:
            chat = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}])
        except InvalidPrompt as error:
            raise UnsupportedModel(f"the model cannot write its own prompts: {error.cause}", _GIVE) from error
        before, found, after = chat.partition(_PLACEHOLDER)
        ending = after.strip()
        if not found or not before or not ending:
            raise UnsupportedModel("the chat template does not mark where the user's message begins and ends", _GIVE)
        ids, first = tokenizer.encode(before, special=False), tokenizer.encode(ending, special=False)[0]
        # A special token can end the message by its id, since it cannot be confused with text.
        special = first in tokenizer.special_ids
        return UserTurn(tuple(ids), () if special else (ending,), (first,) if special else ())

    def begin(self, number: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Return the opening of text `number`, and the token ids that the model continues."""
        opening = OPENINGS[number // 2 % len(OPENINGS)] if number % 2 else ""
        return opening, [*self.before, *tokenizer.encode(opening, special=False)]

    def sampling(self, seed: int) -> Sampling:
        """Return the sampling parameters of one text."""
        return Sampling(
            max_new_tokens=LONGEST + 1, temperature=1.0, seed=seed, stop=self.stop, stop_token_ids=self.stop_token_ids
        )


_GIVE = "Give prompts in a file with --prompts FILE"


@dataclass(slots=True)
class _PromptWriter:
    """Generates prompts.

    Texts are numbered in the order of generation. The number determines a text's seed and becomes the prompt's id.

    Attributes:
        known: Hashes of the prompts written so far.
        next: Number of the next text.
    """

    llm: LLM
    turn: UserTurn
    journal: Journal
    seed: int
    progress: Progress
    on_progress: OnProgress
    known: set[int] = field(default_factory=set)
    next: int = 0

    def recall(self, line: bytes, number: int) -> None:
        """Record a prompt that is already in the file."""
        prompt = parse_prompt(line, number)
        if not isinstance(prompt.id, int) or not isinstance(prompt.prompt, str):
            raise ValueError("this prompt was not written by the model")
        self.known.add(_text_key(prompt.prompt))
        self.next = prompt.id + 1
        self.progress.kept += 1

    def write(self, tries: int, width: int) -> None:
        """Generate this many texts, and append the usable ones in order."""
        numbers = range(self.next, self.next + tries)
        begun = [self.turn.begin(number, self.llm.tokenizer) for number in numbers]
        completions = self._complete(numbers, [ids for _, ids in begun], width)
        for number, (opening, _), completion in zip(numbers, begun, completions, strict=True):
            if self.progress.done >= self.progress.total:
                return
            self._keep_if_usable(number, opening, completion)
        self.next += tries
        if self.progress.skipped > TRIES * (self.progress.written + GROUP):
            raise UnsupportedModel(
                f"the model wrote {self.progress.skipped + self.progress.written} prompts, "
                f"but only {self.progress.written} of them are usable",
                _GIVE,
            )

    def _complete(self, numbers: range, prompts: list[list[int]], width: int) -> list[Completion]:
        sampling = [self.turn.sampling(derive_seed(self.seed, number)) for number in numbers]
        with self.llm.batch(prompts, sampling, width=width) as batch:
            for _ in chunks_of(batch):
                self.progress.tokens += 1
                self.on_progress(self.progress)
        return batch.completions

    def _keep_if_usable(self, number: int, opening: str, completion: Completion) -> None:
        text = (opening + completion.text).strip()
        if _is_complete(completion, self.llm.tokenizer.special_ids) and _text_key(text) not in self.known:
            self.known.add(_text_key(text))
            self.journal.append({"id": number, "prompt": text})
            self.progress.written += 1
        else:
            self.progress.skipped += 1


def _is_complete(completion: Completion, special: frozenset[int]) -> bool:
    """Return True if this is one whole turn of a usable length."""
    tokens = completion.token_ids[:-1]
    ended = completion.finish_reason in ("eos", "stop") and bool(completion.text.strip())
    return ended and len(tokens) >= SHORTEST and special.isdisjoint(tokens)


def _text_key(text: str) -> int:
    """Return a hash that ignores case and spacing."""
    return derive_seed(0, " ".join(text.casefold().split()))
