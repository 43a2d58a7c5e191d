"""Body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.server.compat import RAW, accepts, only
from paceline.server.schema import RequestBody, Text, TokenIds


@accepts(
    RAW,
    only((True,), "add_special_tokens", "send token ids for a prompt without BOS"),
    only((), "prompt_embeds", "a prompt is text or token ids"),
)
class CompletionRequest(RequestBody):
    """Body of /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None
    suffix: Annotated[Text | None, Field(description="Text after the gap that the reply fills.")] = None

    @property
    def samples(self) -> int:
        """Replies to generate for each prompt."""
        return self.best_of or self.n or 1

    @property
    def ranked(self) -> bool:
        """Whether only the likeliest replies are returned."""
        return self.samples > (self.n or 1)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.samples < (self.n or 1):
            raise ValueError(f"best_of must be >= n, got {self.best_of} with n={self.n}")
        if self.ranked and (self.stream or self.echo):
            raise ValueError("best_of beyond n cannot be combined with stream or echo: the best is known at the end")
        if self.suffix and self.echo and self.logprobs is not None:
            raise ValueError("suffix cannot be combined with echo and logprobs")
        return self
