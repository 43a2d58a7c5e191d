"""JSON schemas as clients send them, in the form that llguidance can enforce.

The rewritten schema never allows more than the one that was sent, and where it allows less there is a reason:
objects with `properties` are closed, since a model that may add keys adds them without end. What cannot be enforced is
an error, or is left out with a note in the log if the client asked for a guide ("lenient" in "x-guidance").
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, permutations
from typing import Any
from urllib.parse import unquote

from paceline.sampling.look_ahead import has_look_around, without_look_ahead

_LOG = logging.getLogger("paceline")

Schema = dict[str, Any]
Parts = list[Mapping[str, Any]]
"""Schemas that describe the same object."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Values of `format` that are enforced. All others are annotations, which is what the standard says of `format`."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_UNENFORCED = (
    *("contains", "minContains", "maxContains", "if", "not", "dependencies", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "unevaluatedItems", "propertyNames"),
)
_OF_ANY_NAME = {"type", "title", "description", "format", "default", "examples", "$comment", "deprecated"}
"""Keywords that say nothing of a property's name."""
_HIGHEST, _LOWEST = 2**63 - 1024, 1024 - 2**63
"""Bounds of numbers that llguidance can express."""
_MOST = 100_000
"""Steps of rewriting, which takes some 10 microseconds each."""
_ARRAYS = 400
"""Arrays without repeated items that are written out: those of 5 items are 326."""
_ITEMS = 100
"""Items of an array whose items should differ, where that is ignored and nothing else bounds them."""
_KINDS = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", dict: "object"}


def enforceable(schema: Any, options: Mapping[str, Any]) -> Schema:
    """Return a schema in a form that can be enforced. Raises `ValueError` naming a keyword that cannot be.

    `options`: llguidance's, unless "x-guidance" in the schema sets them. "lenient" leaves out what cannot be enforced,
    and logs each such keyword once.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"it must be an object, true or false, got {schema!r:.60}")
    options = {**options, **_mapping(schema.get("x-guidance"))}
    try:
        made = _Rewriter(schema, options.get("lenient") is True).root()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {**made, "x-guidance": options}


def guide(schema: Mapping[str, Any], lenient: bool = True) -> Schema:
    """Return a schema that says whether it is a guide, if it does not say so itself."""
    return {**schema, "x-guidance": {"lenient": lenient, **_mapping(schema.get("x-guidance"))}}


@lru_cache(maxsize=256)
def _note(said: str) -> None:
    _LOG.warning("a JSON schema is followed without %s, which cannot be enforced", said)


class _Rewriter:
    def __init__(self, root: Mapping[str, Any], lenient: bool) -> None:
        self._root, self._lenient = root, lenient
        self._open: dict[tuple[str, int], str] = {}
        """(Reference, number of an object) -> name of its copy that is a part of this object's description."""
        self._group = 0
        self._forbidden: dict[int, list[Schema]] = {}
        """Choice, by its identity -> keys that each of its branches must not have."""
        self._copies: Schema = {}
        self._steps = 0

    def root(self) -> Schema:
        """Return the whole schema."""
        made = self._schema(self._root)
        if not isinstance(made, dict):
            return {} if made else {"enum": []}
        if self._copies:
            made["$defs"] = {**made.get("$defs", {}), **self._copies}
        return made

    def _schema(self, schema: Any, part: bool = False) -> Any:
        """Return a schema rewritten. `part`: it is one of several that describe the same object, which is closed with
        all their properties, or not at all."""
        if not isinstance(schema, Mapping):
            return schema
        self._count(len(schema))
        made = self._plain(dict(schema))
        if made.get("not") in ({}, True):
            return False
        self._choices(made)
        self._strings(made)
        self._unique(made)
        self._names(made)
        self._keys(made)
        parts = self._objects(made, part)
        self._drop_unenforced(made)
        return self._inside(made, parts)

    def _plain(self, made: Schema) -> Schema:
        """Drop what says nothing, and put bounds into the range of 64 bits."""
        made.pop("$schema", None)
        types = made.get("type", "string")
        if made.get("format") not in FORMATS or "string" not in (types if isinstance(types, list) else [types]):
            made.pop("format", None)
        if made.get("not") is False:
            del made["not"]
        if not made.get("uniqueItems"):
            made.pop("uniqueItems", None)
        if "if" not in made or not made.keys() & {"then", "else"}:
            for key in ("if", "then", "else"):
                made.pop(key, None)
        for key in ("minContains", "maxContains") if "contains" not in made else ():
            made.pop(key, None)
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if made.get(key) in (True, {}):
                made[key] = True
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            if made.get(key) == {}:
                del made[key]
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            self._bound(made, key)
        return made

    def _bound(self, made: Schema, key: str) -> None:
        bound = made.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or _LOWEST <= bound <= _HIGHEST:
            return
        outward = (bound > 0) == key.lower().endswith("maximum")
        if outward and abs(bound) >= 1.797e308:  # beyond every number that a program holds
            del made[key]
        elif outward:
            made[key] = _HIGHEST if bound > 0 else _LOWEST
        else:
            self._refuse(made, key, f"{key} {bound}")

    def _choices(self, made: Schema) -> None:
        """Turn a oneOf whose branches exclude one another into an anyOf, which is the same then."""
        branches = made.get("oneOf")
        if not isinstance(branches, list):
            return
        if len(branches) > 1 and not self._disjoint(branches):
            if not self._lenient:
                return  # llguidance may know better
            _note("the exclusiveness of oneOf")
        del made["oneOf"]
        if "anyOf" in made:
            made["allOf"] = [*_list(made.get("allOf")), {"anyOf": branches}]
        else:
            made["anyOf"] = branches

    def _strings(self, made: Schema) -> None:
        """Replace look-ahead in a pattern by further patterns, all of which a text must match."""
        pattern = made.get("pattern")
        if not isinstance(pattern, str) or not has_look_around(pattern):
            return
        equal = without_look_ahead(pattern)
        if equal is None:
            self._refuse(made, "pattern", f"the look-around or reference in the pattern {pattern!r:.200}")
            return
        made["pattern"], *others = equal
        if others:
            made["allOf"] = [*_list(made.get("allOf")), *({"pattern": other} for other in others)]

    def _unique(self, made: Schema) -> None:
        """Write out the arrays of a few different values, if their items must differ."""
        if "uniqueItems" not in made:
            return
        least, most, values = made.get("minItems", 0), made.get("maxItems", _ARRAYS), self._values(made.get("items"))
        if most in (0, 1):
            del made["uniqueItems"]
            return
        arrays = None
        if values and not made.keys() & {"prefixItems", "contains", "enum", "const"}:
            arrays = _arrays(values, least, most)
        if arrays is None:
            self._refuse(made, "uniqueItems", "uniqueItems")
            self._limit_items(made, values)
            return
        for key in ("uniqueItems", "items", "minItems", "maxItems", "type"):
            made.pop(key, None)
        made["enum"] = arrays

    def _limit_items(self, made: Schema, values: list[Any]) -> None:
        """Bound an array whose items should differ and may not: a small model repeats an item without end."""
        least, most = made.get("minItems", 0), made.get("maxItems")
        different = len(values) or max(_ITEMS, len(_list(made.get("prefixItems"))))
        if isinstance(least, int) and (most is None or (values and isinstance(most, int))):
            made["maxItems"] = max(least, different if most is None else min(different, most))

    def _values(self, schema: Any) -> list[Any]:
        """Return all values that a schema allows, none if they are many."""
        schema = self._resolved(schema)
        return [True, False] if schema.get("type") == "boolean" else _values(schema)

    def _names(self, made: Schema) -> None:
        """Express a condition on the names of an object by its properties."""
        if "propertyNames" not in made:
            return
        names = self._resolved(made["propertyNames"])
        conditions, values = set(names.keys() - _OF_ANY_NAME), self._values(names)
        if made["propertyNames"] is False:
            conditions = {"not"}
        if not conditions:
            del made["propertyNames"]
            return
        mapped = made.get("additionalProperties", {})
        if conditions == {"pattern"}:
            pattern = names["pattern"]
        elif conditions <= {"minLength", "maxLength"}:
            pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        else:
            pattern = None
        if made.keys() & {"properties", "patternProperties"} or (pattern is None and not values):
            self._refuse(made, "propertyNames", "propertyNames")
            return
        del made["propertyNames"]
        made["additionalProperties"] = False
        if pattern is None:
            made["properties"] = {name: mapped for name in values if isinstance(name, str)}
        else:
            made["patternProperties"] = {pattern: mapped}

    def _keys(self, made: Schema) -> None:
        """Take look-ahead out of the patterns of keys."""
        for pattern, value in _mapping(made.get("patternProperties")).items():
            if has_look_around(pattern):
                made["patternProperties"] = {k: v for k, v in made["patternProperties"].items() if k != pattern}
                equal = without_look_ahead(pattern)
                if equal and len(equal) == 1:
                    made["patternProperties"][equal[0]] = value
                else:
                    self._refuse(
                        {"": None}, "", f"the look-around in the pattern {pattern!r:.200} of patternProperties"
                    )
                    made["additionalProperties"] = value if made.get("additionalProperties") is False else True

    def _drop_unenforced(self, made: Schema) -> None:
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if made.get(key) is True:
                del made[key]
        for key in _UNENFORCED:
            if key in made:
                self._refuse(made, key, key)
        for key in ("then", "else"):  # of an `if`
            made.pop(key, None)

    def _refuse(self, made: Schema, key: str, said: str) -> None:
        if not self._lenient:
            raise ValueError(
                f'{said} cannot be enforced; {{"x-guidance": {{"lenient": true}}}} in the schema ignores it'
            )
        del made[key]
        _note(said)

    # Objects

    def _close(self, made: Schema, parts: list[Mapping[str, Any]], single: bool) -> None:
        """Forbid further keys of an object that these parts describe, unless one of them says which it may have.

        `single`: it is described by one schema.
        """
        known: dict[str, Any] = {}
        for part in parts:
            if "additionalProperties" in part or part.get("unevaluatedProperties") not in (None, False):
                return
            known |= dict.fromkeys(_mapping(part.get("properties")), True)
            known |= dict.fromkeys((name for name in _list(part.get("required")) if isinstance(name, str)), True)
        if single and not made.keys() & {"type", "$ref", "allOf", "anyOf"}:
            made["type"] = "object"
        made["properties"] = {**known, **_mapping(made.get("properties"))}
        made["additionalProperties"] = False

    def _objects(self, made: Schema, part: bool) -> bool:
        """Close an object. Return whether the schemas in this one are parts of its description.

        `part`: it is itself a part of another, which is closed as a whole.
        """
        if part:
            return True
        inner = [*_list(made.get("allOf")), *([{"$ref": made["$ref"]}] if "$ref" in made else [])]
        described = sum(map(self._describes, [*inner, {"anyOf": _list(made.get("anyOf"))}]))
        several = described + ("properties" in made) > 1 or "unevaluatedProperties" in made
        if several:
            self._group += 1
            self._separate(made)
        if several or "properties" in made:
            self._close(made, list(self._parts(made)), single=not several)
        if made.get("unevaluatedProperties") is False:
            del made["unevaluatedProperties"]
        return several

    def _separate(self, made: Schema) -> None:
        """Note which keys each branch of a choice must not have: those that only other branches have.

        All keys of all branches are allowed where their object is closed.
        """
        for choice in [one[key] for one in self._parts(made) for key in ("anyOf", "oneOf") if _list(one.get(key))]:
            outside = _names_in(self._parts(made, without=choice))
            names = [_names_in(self._parts(branch)) for branch in choice]
            self._count(len(choice) * len(set().union(*names)))
            self._forbidden[id(choice)] = [
                {name: False for other in names for name in other if name not in own and name not in outside}
                for own in names
            ]

    def _describes(self, schema: Any) -> bool:
        return any("properties" in one for one in self._parts(schema))

    def _parts(self, schema: Any, without: list[Any] | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that describe the same object as this one, itself first, leaving out a choice."""
        seen: set[int] = set()
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            self._count(len(_mapping(one.get("properties"))) + len(_list(one.get("required"))))
            yield one
            within = [
                one[key] for key in ("oneOf", "anyOf", "allOf") if _list(one.get(key)) and one[key] is not without
            ]
            waiting += [branch for branches in within for branch in reversed(branches)]
            if "$ref" in one:
                waiting.append(self._target(one["$ref"]))

    def _inside(self, made: Schema, parts: bool) -> Schema:
        """Rewrite the schemas within one. `parts`: they describe the same object together."""
        for key in _MAPS:
            if isinstance(made.get(key), Mapping):
                made[key] = {name: self._schema(one) for name, one in made[key].items()}
        for key in _LISTS:
            if isinstance(made.get(key), list):
                forbidden = self._forbidden.get(id(made[key])) if parts else None
                made[key] = [self._schema(one, parts and key != "prefixItems") for one in made[key]]
                for one, keys in zip(made[key], forbidden or (), strict=False):
                    if isinstance(one, dict) and keys:
                        one["properties"] = {**keys, **_mapping(one.get("properties"))}
        for key in _SINGLE:
            if isinstance(made.get(key), list):
                made[key] = [self._schema(one) for one in made[key]]
            elif key in made:
                made[key] = self._schema(made[key])
        if parts and "$ref" in made:
            made["$ref"] = self._open_copy(made["$ref"])
        return made

    def _open_copy(self, reference: Any) -> Any:
        """Return a reference to a copy of what one names, not closed."""
        target = self._target(reference)
        if not self._describes(target):
            return reference
        key = reference, self._group
        if key not in self._open:
            name = f"open-{len(self._open)}"
            while name in _mapping(self._root.get("$defs")):
                name += "-"
            self._open[key] = name
            inner = {key: value for key, value in target.items() if key not in ("$defs", "definitions", "x-guidance")}
            self._copies[name] = self._schema(inner, part=True)
        return f"#/$defs/{self._open[key]}"

    def _target(self, reference: Any) -> Any:
        """Return what a reference within the schema names, None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    def _count(self, steps: int) -> None:
        self._steps += 1 + steps
        if self._steps > _MOST:
            raise ValueError("it is too large")

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema, or what it refers to; an empty one for what is no schema."""
        for _ in range(16):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"])
        return _mapping(schema)

    # Branches

    def _disjoint(self, branches: list[Any]) -> bool:
        """Return whether no value fits two of the branches, as far as types, constants and keys tell."""
        by_kind: dict[str, list[Parts]] = {}
        for branch in branches:
            parts = [one for one in self._parts(branch) if not one.keys() & {"anyOf", "oneOf"}]
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
    """Return the JSON types that a schema in these parts allows, none if it does not say so."""
    for one in parts:
        if values := _values(one):
            return {_kind(value) for value in values}
        if given := one.get("type"):
            return {
                "number" if kind == "integer" else str(kind) for kind in (given if isinstance(given, list) else [given])
            }
    return {"object"} if any("properties" in one for one in parts) else set()


def _tell_apart(several: list[Parts]) -> bool:
    """Return whether objects can be told apart by constants of a key, or by keys that only one of them has.

    An object that is closed has none of the other schemas' own keys. So it fits none that requires such a key, nor one
    that forbids further keys itself.
    """
    keys = [
        {name for one in parts for name in _list(one.get("required")) if isinstance(name, str)} for parts in several
    ]
    for name in set.intersection(*keys):
        if _distinct(_constants(_property(parts, name)) for parts in several):
            return True
    counts = Counter(
        name for parts in several for name in {k for one in parts for k in _mapping(one.get("properties"))}
    )
    without = [parts for parts, required in zip(several, keys, strict=True) if all(counts[k] != 1 for k in required)]
    may_grow = any(one.get("additionalProperties") not in (None, False) for parts in several for one in parts)
    forbids = all(any(one.get("additionalProperties") is False for one in parts) for parts in without)
    return not may_grow and len(without) <= 1 and forbids


def _names_in(parts: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Return the keys that schemas describe, in order."""
    return {name: None for one in parts for name in _mapping(one.get("properties"))}


def _property(parts: Parts, name: str) -> Parts:
    return [_mapping(_mapping(one.get("properties")).get(name)) for one in parts]


def _constants(parts: Parts) -> list[Any]:
    """Return the values that a schema in these parts allows, none if they are not named."""
    return next((values for one in parts if (values := _values(one))), [])


def _distinct(groups: Iterable[list[Any]]) -> bool:
    """Return whether all groups have values, and no two have the same."""
    seen: set[str] = set()
    for values in groups:
        named = {f"{_kind(value)} {value!r}" for value in values}
        if not named or named & seen:
            return False
        seen |= named
    return True


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "array")


def _arrays(values: list[Any], least: Any, most: Any) -> list[list[Any]] | None:
    """Return all arrays of different values with these lengths, None if they are many."""
    if not isinstance(least, int) or not isinstance(most, int) or len(values) > _ARRAYS:
        return None
    sizes = range(least, min(most, len(values)) + 1)
    made = list(islice((list(array) for n in sizes for array in permutations(values, n)), _ARRAYS + 1))
    return made if len(made) <= _ARRAYS else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
