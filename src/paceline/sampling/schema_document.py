"""A JSON schema as a document: its references, and the schemas in it that describe the same object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_MAX_STEPS = 100_000
"""Maximum number of rewriting steps. A step takes about 10 microseconds."""


class SchemaDocument:
    """A schema, and the number of rewriting steps that have been spent on it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._steps = 0

    def count(self, steps: int) -> None:
        """Count rewriting steps. Raise `ValueError` if the schema needs too many."""
        self._steps += 1 + steps
        if self._steps > _MAX_STEPS:
            raise ValueError("it is too large")

    def target(self, reference: Any) -> Any:
        """Return the target of a reference within the schema, or None for any other reference."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self.root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema or the target of its reference. Return an empty schema for anything else."""
        for _ in range(16):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        return as_mapping(schema)

    def values(self, schema: Any) -> list[Any]:
        """Return all values that a schema allows. The list is empty if the schema does not enumerate them."""
        schema = self.resolved(schema)
        return [True, False] if schema.get("type") == "boolean" else named_values(schema)

    def describes(self, schema: Any) -> bool:
        """Return True if a schema names properties of an object."""
        return any("properties" in one for one in self.parts(schema))

    def parts(self, schema: Any, without: list[Any] | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield this schema and all schemas that describe the same object. Omit the choice `without`."""
        seen: set[int] = set()
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            self.count(len(as_mapping(one.get("properties"))) + len(as_list(one.get("required"))))
            yield one
            within = [
                one[key] for key in ("oneOf", "anyOf", "allOf") if as_list(one.get(key)) and one[key] is not without
            ]
            waiting += [branch for branches in within for branch in reversed(branches)]
            if "$ref" in one:
                waiting.append(self.target(one["$ref"]))


def named_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema names with `const` or `enum`."""
    return [schema["const"]] if "const" in schema else as_list(schema.get("enum"))


def as_list(value: Any) -> list[Any]:
    """Return a value if it is a list, and an empty list otherwise. Clients may send anything."""
    return value if isinstance(value, list) else []


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value if it is an object, and an empty object otherwise."""
    return value if isinstance(value, Mapping) else {}
