"""Checks whether a value may match two branches of a choice (`oneOf` or `anyOf`) in a JSON schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.sampling.schema_document import SchemaDocument, as_list, as_mapping, named_values

Parts = list[Mapping[str, Any]]
"""Schemas that describe the same object."""

_KINDS = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", dict: "object"}


def disjoint(document: SchemaDocument, branches: list[Any]) -> bool:
    """Return True if types, constants or keys show that no value matches two branches."""
    by_kind: dict[str, list[Parts]] = {}
    for branch in branches:
        parts = [one for one in document.parts(branch) if not one.keys() & {"anyOf", "oneOf"}]
        kinds = _kinds(parts)
        if not kinds:
            return False
        for kind in kinds:
            by_kind.setdefault(kind, []).append(parts)
    return all(
        len(several) == 1 or (_tell_apart(several) if kind == "object" else _distinct(map(_constants, several)))
        for kind, several in by_kind.items()
    )


def _kinds(parts: Parts) -> set[str]:
    """Return the JSON types that a schema with these parts allows. The set is empty if the schema does not restrict
    them."""
    for one in parts:
        if values := named_values(one):
            return {_kind(value) for value in values}
        if given := one.get("type"):
            return {
                "number" if kind == "integer" else str(kind) for kind in (given if isinstance(given, list) else [given])
            }
    return {"object"} if any("properties" in one for one in parts) else set()


def _tell_apart(several: list[Parts]) -> bool:
    """Return True if objects of these schemas can be distinguished, by constants of a key or by a key that only one of
    them has.

    A closed object has no keys that only other schemas have. So it does not match a schema that requires such a key,
    nor a schema that forbids additional keys.
    """
    keys = [
        {name for one in parts for name in as_list(one.get("required")) if isinstance(name, str)} for parts in several
    ]
    for name in set.intersection(*keys):
        if _distinct(_constants(_property(parts, name)) for parts in several):
            return True
    counts = Counter(
        name for parts in several for name in {k for one in parts for k in as_mapping(one.get("properties"))}
    )
    without = [parts for parts, required in zip(several, keys, strict=True) if all(counts[k] != 1 for k in required)]
    may_grow = any(one.get("additionalProperties") not in (None, False) for parts in several for one in parts)
    forbids = all(any(one.get("additionalProperties") is False for one in parts) for parts in without)
    return not may_grow and len(without) <= 1 and forbids


def _property(parts: Parts, name: str) -> Parts:
    return [as_mapping(as_mapping(one.get("properties")).get(name)) for one in parts]


def _constants(parts: Parts) -> list[Any]:
    """Return the values that a schema with these parts enumerates. The list is empty if it enumerates none."""
    return next((values for one in parts if (values := named_values(one))), [])


def _distinct(groups: Iterable[list[Any]]) -> bool:
    """Return True if all groups have values, and no two groups share a value."""
    seen: set[str] = set()
    for values in groups:
        named = {f"{_kind(value)} {value!r}" for value in values}
        if not named or named & seen:
            return False
        seen |= named
    return True


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "array")
