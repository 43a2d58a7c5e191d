"""A draft never decides whether a reply fails: rows that plain decoding does not reach have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption, NonFiniteLogits, NoTokenLeft, PacelineError
from paceline.llm import LLM
from paceline.sampling.sampler import LogitsProcessor, Prefix
from paceline.testing import Oracle
from paceline.types import DraftBudget
from tests.support.cover import cover
from tests.support.toys import toy_model

MODEL = toy_model()
PROMPT = [1, 2, 3]
EOS = 36
TEXT = [5, 9, 5, 9, 5, 9, 5, 9, EOS]
"""The script of the processors below. In the toy's alphabet, 5 is f and 9 is j."""

STOPS: dict[str, dict[str, Any]] = {
    "eos": {},
    "stop token": {"stop_token_ids": [EOS], "ignore_eos": True},
    "stop string": {"stop": "jfjfjfj"},
    "criterion": {"stop_when": lambda ids, text: len(ids) == 7},
    "length": {"max_new_tokens": 7},
}
FAILURES: dict[str, tuple[type[Exception], Callable[[Tensor], Any]]] = {
    "raises": (IndexError, lambda row: [][0]),
    "bans all": (NoTokenLeft, lambda row: row.fill_(-torch.inf)),
    "not finite": (NonFiniteLogits, lambda row: row.fill_(torch.nan)),
    "no row": (InvalidOption, lambda row: None),
}
DRAFTS: dict[str, Callable[[], tuple[Drafter | None, dict[str, Any]]]] = {
    "oracle": lambda: (Oracle([*PROMPT, *TEXT, 5, 9, 5, 9], 1.0, 37), {}),
    "prediction": lambda: (None, {"prediction": [*TEXT, 5, 9, 5]}),
    "lookup": lambda: (DrafterStack([Suffix(floor=0.0)]), {}),
}
SIZES = {"chain": DraftBudget.chain(12), "tree": DraftBudget(14, 6, 2)}


def script(length: int, failure: Callable[[Tensor], Any]) -> LogitsProcessor:
    """Return a processor that forces the first `length` tokens of the text, and fails afterwards."""

    def process(prefix: Prefix, row: Tensor) -> Any:
        at = len(prefix.reply)
        if at >= length:
            return failure(row)
        return torch.full_like(row, -torch.inf).index_fill_(0, torch.tensor(TEXT[at]), 0.0)

    return process


def reply(llm: LLM, **how: Any) -> tuple[list[int], str | type[Exception]]:
    """Return the tokens that arrived, and the finish reason or the type of the error."""
    tokens: list[int] = []
    try:
        with llm.stream(PROMPT, **{"max_new_tokens": 20, "temperature": 1.0, "seed": 3, **how}) as stream:
            tokens.extend(chunk.token_id for chunk in stream)
    except Exception as error:
        return tokens, type(error)
    return tokens, stream.completion.finish_reason


@cover(draft=DRAFTS, size=SIZES, stop=STOPS, failure=FAILURES, rule=["match", "rejection", "block", "typical"])
def test_rows_past_the_end_of_a_reply_do_not_fail_it(
    draft: Callable[[], tuple[Drafter | None, dict[str, Any]]],
    size: DraftBudget,
    stop: dict[str, Any],
    failure: tuple[type[Exception], Callable[[Tensor], Any]],
    rule: str,
) -> None:
    drafter, more = draft()
    plain = reply(LLM(MODEL), processors=[script(len(TEXT), failure[1])], **stop)
    assert isinstance(plain[1], str), "plain decoding does not reach the failing rows"
    processor = script(len(plain[0]), failure[1])
    assert reply(LLM(MODEL, drafter, size), processors=[processor], rule=rule, **stop, **more) == plain


@cover(draft=DRAFTS, size=SIZES, failure=FAILURES, rule=["match", "rejection", "block", "typical"])
def test_a_failing_row_in_the_reply_fails_it_after_the_tokens_of_plain_decoding(
    draft: Callable[[], tuple[Drafter | None, dict[str, Any]]],
    size: DraftBudget,
    failure: tuple[type[Exception], Callable[[Tensor], Any]],
    rule: str,
) -> None:
    drafter, more = draft()
    processor = script(5, failure[1])
    plain = reply(LLM(MODEL), processors=[processor])
    assert plain == (TEXT[:5], failure[0])
    assert reply(LLM(MODEL, drafter, size), processors=[processor], rule=rule, **more) == plain


def test_bans_that_leave_no_token_after_the_end_do_not_fail_a_reply() -> None:
    bans = {token: -float("inf") for token in range(37) if token not in (5, 7, 9)}
    how: dict[str, Any] = {"logit_bias": bans, "no_repeat_ngram_size": 1, "max_new_tokens": 3, "temperature": 0.0}
    text, _ = reply(LLM(MODEL), **how)
    how |= {"max_new_tokens": 20, "stop_token_ids": [text[-1]]}
    plain = reply(LLM(MODEL), **how)
    assert plain == (text, "stop")
    assert reply(LLM(MODEL), prediction=[*text, 5], **how) == plain
    assert reply(LLM(MODEL, Oracle([*PROMPT, *text, 5, 5], 1.0, 37), SIZES["chain"]), **how) == plain


def test_an_error_of_a_reply_tells_what_was_written() -> None:
    with pytest.raises(PacelineError) as raised:
        LLM(MODEL, *(Oracle([*PROMPT, *TEXT], 1.0, 37), SIZES["chain"])).generate(
            PROMPT, max_new_tokens=9, processors=[script(4, FAILURES["bans all"][1])]
        )
    assert raised.value.partial.token_ids == TEXT[:4]  # type: ignore[union-attr]
