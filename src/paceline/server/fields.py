"""Types of fields that the bodies of several APIs share."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.text.past_calls import as_object

MAX_STOPS, MAX_BIASES, MAX_TOOLS = 16, 4096, 512

Text = Annotated[str, Field(max_length=4_000_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Without fail_fast pydantic reports each of a million wrong entries, which takes seconds and holds up other requests.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)]
Schema = dict[str, Any]
ModelName = Annotated[str, Field(max_length=500)]


def at_most(limit: int, name: str) -> BeforeValidator:
    """A limit that is checked before pydantic reports each of a hundred thousand wrong entries."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"at most {limit} {name} are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)


def _without_empty(stop: Any) -> Any:
    """Return stop strings without empty ones, which clients send for none."""
    if isinstance(stop, list) and len(stop) <= MAX_STOPS:
        return [text for text in stop if text != ""]
    return None if stop == "" else stop


WITHOUT_EMPTY = BeforeValidator(_without_empty)
Length = Annotated[int, Field(ge=-1, le=2**31, description="-1: as many as fit.")]
Penalty = Annotated[float, Field(ge=0.01, le=1000)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, lt=2**31, description="Maximum tokens of reasoning. -1: no limit.")]


def _argument_text(value: Any) -> Any:
    """Return a past call's arguments as text, as which they should have been sent."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ArgumentsText = Annotated[
    Text,
    BeforeValidator(_argument_text),
    Field(description="A JSON object, as text. Any other text is shown as it is."),
]
Arguments = Annotated[Schema, BeforeValidator(as_object)]
"""A past call's arguments as an object, however they were sent."""
CalledName = Annotated[str, Field(max_length=500)]
"""Name in a past call, which a model may have made up."""


def without_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
