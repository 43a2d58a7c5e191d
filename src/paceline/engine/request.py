"""The state of one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.engine.detokenizer import TextStream, TrimmedVerdict
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

    A request changes only when a round commits, so a round that fails before its commit can be repeated.

    Attributes:
        token_ids: Token ids of the prompt and of the reply so far. The last one is the pending token, which is not in
            the cache yet.
        num_prompt_tokens: Length of the prompt.
        sampler: Chooses the reply's tokens.
        stream: Converts the reply's tokens to text and decides where the reply ends.
        stats: Statistics of the reply.
        slot: The request's slot in the cache.
        policy: The drafter. None for plain decoding.
        max_draft: Maximum draft per round. None if the policy's maximum applies.
        prompt_reader: Collects data from the prompt (see `PromptReader`).
        prediction: Drafts from the expected reply (predicted outputs), in preference to the drafter.
        num_seen_tokens: Length of `token_ids` when the drafter last drafted.
        finish: The finish reason. None until the reply ends.
        error: The error that ended the reply.
        active: True if the request holds its slot.
        adapter: See `KVCache.acquire`.
        resumed: True if the request gave up its slot and later acquired another one.
        images: The prompt with its images. None if it contains no images.
        learned_by: Controllers that have learned from this request.
        on_finish: Called once, with the request, when it has ended.
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
    learned_by: set[Controller] = field(default_factory=set)
    on_finish: Callable[[Request], object] | None = None

    @property
    def ids_with_images(self) -> Sequence[int]:
        """The token ids of the prompt and the reply, as an `ImagePrompt` if the prompt contains images."""
        return ImagePrompt(self.token_ids, self.images.images) if self.images else self.token_ids

    @property
    def cache_ids(self) -> Sequence[int]:
        """The ids that prefix caches compare. An image has ids of its own, so different images never match."""
        return [*self.images.cache_ids, *self.token_ids[len(self.images) :]] if self.images else self.token_ids

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft from these tokens, which the caller expects the reply to contain (predicted outputs)."""
        self.prediction, self.stats.predicted = PredictedReply(tokens), len(tokens)

    @property
    def prefix(self) -> Prefix:
        """The committed text, in the form that samplers and logits processors expect."""
        return Prefix(self.token_ids, (), self.num_prompt_tokens)

    @property
    def position(self) -> int:
        """Position of the pending token, which is also the number of tokens in the cache."""
        return len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.error, self.finish = error, "error"


def accept(request: Request, draft: Draft, logits: Tensor) -> TrimmedVerdict:
    """Verify a draft, without side effects.

    An exception, for example from a user's logits processor or stopping criterion, becomes part of the verdict. It then
    ends this request and no other.

    Args:
        request: The request.
        draft: The request's draft.
        logits: Logits [T, V] of the request's rows in the pass.

    Returns:
        The verdict, truncated where the reply ends.
    """
    try:
        verdict = RULES[request.sampler.rule](draft, logits, request.sampler, request.prefix)
        return request.stream.trim(verdict, draft, logits)
    except Exception as error:
        return TrimmedVerdict((), (), "error", error=error)
