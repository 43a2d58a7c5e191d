"""The state of one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.engine.detokenizer import TextStream, Trimmed
from paceline.engine.draft_length import Controller
from paceline.engine.draft_policy import DraftPolicy
from paceline.engine.prediction import PredictedReply
from paceline.engine.prompt_logprobs import PromptReader
from paceline.engine.stats import Stats
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import Draft, DraftBudget, FinishReason
from paceline.verify.rules import RULES


@dataclass(eq=False)
class Request:
    """A reply in progress. Its state advances only when a round commits, so a round that fails before can be repeated.

    `token_ids`: prompt and reply so far; the last one is the pending token, chosen but not yet in the cache.
    `max_draft`: the most to draft per round; None leaves it to the policy. `prompt_reader`: collects
    something of the prompt, which is then fed whole, whatever the prefix cache holds. `num_seen_tokens`: the text's
    length when the drafter last drafted. `prediction`: drafts what the reply is expected to be, before the drafter.
    `active`: whether the request holds its slot. `adapter`: see `KVCache.acquire`. `judged`: controllers that have
    learned from it. `on_finish`: called once, when the request has ended.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    sampler: Sampler
    stream: TextStream
    stats: Stats
    slot: int
    policy: DraftPolicy | None = None
    max_draft: DraftBudget | None = None
    prompt_reader: PromptReader | None = None
    prediction: PredictedReply | None = None
    num_seen_tokens: int = 0
    finish: FinishReason | None = None
    error: Exception | None = None
    active: bool = True
    adapter: int = 0
    judged: set[Controller] = field(default_factory=set)
    on_finish: Callable[[Request], object] | None = None

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft these tokens, which the reply is expected to consist of."""
        self.prediction, self.stats.predicted = PredictedReply(tokens), len(tokens)

    @property
    def prefix(self) -> Prefix:
        """The committed text, as samplers and processors take it."""
        return Prefix(self.token_ids, (), self.num_prompt_tokens)

    @property
    def position(self) -> int:
        """Position of the pending token; also the number of tokens that the cache holds."""
        return len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.finish = error, "error"


def accept(request: Request, draft: Draft, logits: Tensor) -> Trimmed:
    """Return the verdict on a draft, cut where the reply ends. Changes nothing. `logits` [T, V]: of the round's rows.

    An error here, for example of a user's processor or criterion, ends this request alone.
    """
    try:
        verdict = RULES[request.sampler.rule](draft, logits, request.sampler, request.prefix)
        return request.stream.trim(verdict, draft, logits)
    except Exception as error:
        return Trimmed((), (), "error", error=error)
