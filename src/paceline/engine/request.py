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
from paceline.vision.prompt import ImagePrompt


@dataclass(eq=False)
class Request:
    """A reply in progress.

    Its state changes only when a round commits, so a round that fails before the commit can be repeated.

    Attributes:
        token_ids: Token ids of prompt and reply so far. The last one is the pending token, which is not in the cache
            yet.
        num_prompt_tokens: Length of the prompt.
        sampler: Chooses tokens.
        stream: Converts tokens to text.
        stats: Statistics of the reply.
        slot: The request's slot in the cache.
        policy: The drafter. None for plain decoding.
        max_draft: Maximum draft per round. None for the maximum of the policy.
        prompt_reader: Collects data from the prompt (see `PromptReader`).
        prediction: Drafts the expected text. It takes precedence over the drafter.
        num_seen_tokens: Length of the text when the drafter last drafted.
        finish: The finish reason, once the reply has ended.
        error: The error that ended the reply.
        active: True if the request holds its slot.
        adapter: See `KVCache.acquire`.
        resumed: True if the request released its slot and acquired another one.
        images: The prompt, if it contains images.
        judged: Controllers that have learned from this request.
        on_finish: Called once, when the request has ended.
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
    resumed: bool = False
    images: ImagePrompt | None = None
    judged: set[Controller] = field(default_factory=set)
    on_finish: Callable[[Request], object] | None = None

    @property
    def ids_with_images(self) -> Sequence[int]:
        """The token ids of prompt and reply, as an `ImagePrompt` if there are images among them."""
        return ImagePrompt(self.token_ids, self.images.images) if self.images else self.token_ids

    @property
    def cache_ids(self) -> Sequence[int]:
        """The ids by which prefix caches compare the text."""
        return [*self.images.cache_ids, *self.token_ids[len(self.images) :]] if self.images else self.token_ids

    def expect(self, tokens: Sequence[int]) -> None:
        """Use the expected tokens of the reply as drafts."""
        self.prediction, self.stats.predicted = PredictedReply(tokens), len(tokens)

    @property
    def prefix(self) -> Prefix:
        """The committed text, in the form that samplers and processors take."""
        return Prefix(self.token_ids, (), self.num_prompt_tokens)

    @property
    def position(self) -> int:
        """Position of the pending token, which is also the number of tokens in the cache."""
        return len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.error, self.finish = error, "error"


def accept(request: Request, draft: Draft, logits: Tensor) -> Trimmed:
    """Verify a draft, without side effects.

    An error, for example in a user's processor or criterion, becomes part of the verdict, so that it ends only this
    request.

    Args:
        request: The request.
        draft: Its draft.
        logits: Logits [T, V] of its rows in the pass.

    Returns:
        The verdict, cut where the reply ends.
    """
    try:
        verdict = RULES[request.sampler.rule](draft, logits, request.sampler, request.prefix)
        return request.stream.trim(verdict, draft, logits)
    except Exception as error:
        return Trimmed((), (), "error", error=error)
