"""Formats of replies that requests ask for: a JSON schema, an expression, a grammar, a choice of texts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.sampling.json_schema import guide
from paceline.server.compat import Strict, accepts, ignored, only
from paceline.server.fields import Name, Schema, Text
from paceline.server.grammars import ANY_OBJECT, Constraint


class JsonSchema(Strict):
    name: Name = "schema"
    description: Text | None = None
    schema_: Annotated[Schema | None, Field(alias="schema", description="Left out: any JSON object.")] = None
    strict: bool | None = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


_OF_SCHEMAS = {"type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"}
"""Keywords that tell a JSON schema from an object that contains one."""


def schema_format(form: Any) -> Any:
    """Return response formats of other servers in OpenAI's shape. Some lack the envelope around the schema."""
    if not isinstance(form, dict):
        return form
    plain, schema = {key: value for key, value in form.items() if key != "schema"}, form.get("schema")
    if form.get("type") == "json_object" and isinstance(schema, dict):
        return {**plain, "type": "json_schema", "json_schema": {"schema": schema}}
    inner = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(schema, dict) and inner is None:
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    if isinstance(inner, dict) and "schema" not in inner and inner.keys() & _OF_SCHEMAS:
        return {**form, "json_schema": {"schema": inner}}
    return form


ResponseFormat = Annotated[
    Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")], BeforeValidator(schema_format)
]


def schema_constraint(asked: JsonSchema) -> Constraint:
    """Return the constraint of a JSON schema. It is a guide unless it is strict."""
    return "json_schema", guide(ANY_OBJECT if asked.schema_ is None else asked.schema_, lenient=not asked.strict)


def format_constraint(form: PlainFormat | SchemaFormat | None) -> Constraint | None:
    """Return the constraint of a response format."""
    if form is None or form.type == "text":
        return None
    return schema_constraint(form.json_schema if isinstance(form, SchemaFormat) else JsonSchema())


Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=10_000)]], Field(min_length=1, max_length=1000)]
GrammarText = Annotated[str, Field(min_length=1, max_length=100_000)]


@accepts(
    ignored(
        "disable_fallback disable_any_whitespace disable_additional_properties whitespace_pattern backend",
        "grammars are compiled in one way, JSON on one line",
    ),
    only((), "structural_tag", "`tools` and `response_format` have the model's own form"),
)
class StructuredOutputs(Strict):
    """vLLM's constraints. A request has one of them."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
