"""A model that writes a given text for any prompt, as far as a grammar allows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F

from paceline.checkpoints.loader import Loaded
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.protocols import KVCache
from paceline.text.tokenizer import Tokenizer
from paceline.types import Forward, Rows, Want
from tests.support.bigram import Bigram
from tests.support.vocabularies import byte_level

TEMPLATE = "{# of a family that knows tools, <tool_call>, and writes <think>...</think> #}go:"
"""A template whose prompt is always the same."""


class Script(Bigram):
    """Logits by position. The script's next token has the highest logit."""

    context_length = 2048

    def __init__(self, script: Sequence[int], start: int, vocab_size: int) -> None:
        """Create the target for a prompt of `start` tokens."""
        super().__init__(torch.eye(vocab_size, dtype=torch.float64))
        self._script, self._start = torch.tensor(script), start

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        at = (rows.positions + 1 - self._start).clamp(0, len(self._script) - 1)
        logits = 30.0 * F.one_hot(self._script[at], self.vocab_size).to(self.table)
        taps = dict.fromkeys(want.taps, self.embed(rows.tokens))
        return Forward({"all": logits, "last": logits[:, -1:], "none": logits[:, :0]}[want.logits], taps)


def scripted(text: str, template: str = TEMPLATE, special: Sequence[str] = ()) -> LLM:
    """Return the model. `template` is a chat template of constant length, `special` are additional special tokens."""
    words = byte_level()
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    backend.add_special_tokens(list(special))
    words = Tokenizer(backend, words.special_tokens, template)
    prompt = words.apply_chat_template([{"role": "user", "content": "go"}], True)
    start = len(words.encode(prompt, special=False))
    end = words.eos_token_id
    assert end is not None
    target = Script([*words.encode(text, special=False), end], start, max(words.vocabulary.values()) + 1)
    return LLM(Loaded(target, words, (end,), {}, Path("script")), {"suffix": Suffix()})


def fail_before_the_end(llm: LLM, text: str) -> None:
    """Make the model fail near the end of its text."""
    honest, limit = llm.model.target.forward, len(llm.tokenizer.encode("go:" + text, special=False)) - 2

    def forward(rows: Rows, cache: KVCache, want: Want) -> Forward:
        if int(rows.positions.min()) > limit:
            raise RuntimeError("this model fails here")
        return honest(rows, cache, want)

    llm.model.target.forward = forward  # type: ignore[method-assign]
