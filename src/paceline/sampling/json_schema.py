"""Rewrites clients' JSON schemas such that llguidance can enforce them.

The rewritten schema never allows more than the original schema. It allows less only for objects with `properties`:
they get no other keys, because a model that may add keys sometimes adds keys without end. A keyword that cannot be
enforced is an error. With "lenient" in "x-guidance", such keywords are ignored and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice, permutations
from typing import Any

from paceline.sampling.look_ahead import has_look_around, without_look_ahead
from paceline.sampling.schema_branches import disjoint
from paceline.sampling.schema_document import SchemaDocument, as_list, as_mapping

_LOG = logging.getLogger("paceline")

Schema = dict[str, Any]

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Values of `format` that are enforced. All others are annotations, as the standard allows."""
_KEYWORDS_WITH_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEYWORDS_WITH_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_KEYWORDS_WITH_SCHEMA = ("items", "additionalProperties", "additionalItems", "contains")
_UNENFORCED = (
    *("contains", "minContains", "maxContains", "if", "not", "dependencies", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "unevaluatedItems", "propertyNames"),
)
_NOT_ABOUT_NAMES = {"type", "title", "description", "format", "default", "examples", "$comment", "deprecated"}
"""Keywords that do not restrict the name of a property."""
_MAX_NUMBER, _MIN_NUMBER = 2**63 - 1024, 1024 - 2**63
"""Highest and lowest bounds of numbers that llguidance supports."""
_MAX_ARRAYS = 400
"""Maximum number of arrays to enumerate for arrays without repeated items. With 5 values, there are 326 arrays."""
_MAX_ITEMS = 100
"""Maximum number of items in an array whose items should differ, if the schema gives no limit."""


def enforceable_schema(schema: Any, options: Mapping[str, Any]) -> Schema:
    """Rewrite a schema so that it can be enforced.

    Args:
        schema: The client's schema.
        options: Default values of llguidance's options, which "x-guidance" in the schema overrides. With "lenient",
            keywords that cannot be enforced are ignored, and each of them is logged once.

    Raises:
        ValueError: If a keyword cannot be enforced. The message names it.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"it must be an object, true or false, got {schema!r:.60}")
    options = {**options, **as_mapping(schema.get("x-guidance"))}
    try:
        made = _Rewriter(schema, options.get("lenient") is True).root()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {**made, "x-guidance": options}


def with_leniency(schema: Mapping[str, Any], lenient: bool = True) -> Schema:
    """Return a schema with "lenient" set in its "x-guidance", unless the schema sets it itself."""
    return {**schema, "x-guidance": {"lenient": lenient, **as_mapping(schema.get("x-guidance"))}}


@lru_cache(maxsize=256)
def _log_ignored(said: str) -> None:
    _LOG.warning("a JSON schema is enforced without %s, which is not supported", said)


class _Rewriter:
    def __init__(self, root: Mapping[str, Any], lenient: bool) -> None:
        self._document, self._lenient = SchemaDocument(root), lenient
        self._open: dict[tuple[str, int], str] = {}
        """(Reference, `_group` of an object) -> name of the copy of the reference's target that describes this
        object."""
        self._group = 0
        self._forbidden: dict[int, list[Schema]] = {}
        """`id` of a choice -> for each of its branches, the keys that the branch must not have."""
        self._copies: Schema = {}

    def root(self) -> Schema:
        """Return the rewritten schema."""
        made = self._schema(self._document.root)
        if not isinstance(made, dict):
            return {} if made else {"enum": []}
        if self._copies:
            made["$defs"] = {**made.get("$defs", {}), **self._copies}
        return made

    def _schema(self, schema: Any, part: bool = False) -> Any:
        """Rewrite a schema.

        Args:
            schema: A schema.
            part: True if the schema is one of several that describe the same object. Then only the outermost of
                these schemas forbids other keys.
        """
        if not isinstance(schema, Mapping):
            return schema
        self._document.count(len(schema))
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
        """Remove keywords without effect, and limit bounds to 64 bits."""
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
        if isinstance(bound, bool) or not isinstance(bound, int | float) or _MIN_NUMBER <= bound <= _MAX_NUMBER:
            return
        outward = (bound > 0) == key.lower().endswith("maximum")
        if outward and abs(bound) >= 1.797e308:  # exceeds the range of floats
            del made[key]
        elif outward:
            made[key] = _MAX_NUMBER if bound > 0 else _MIN_NUMBER
        else:
            self._refuse(made, key, f"{key} {bound}")

    def _choices(self, made: Schema) -> None:
        """Replace oneOf with anyOf if the branches exclude each other, because both then have the same meaning."""
        branches = made.get("oneOf")
        if not isinstance(branches, list):
            return
        if len(branches) > 1 and not disjoint(self._document, branches):
            if not self._lenient:
                return  # llguidance may support this oneOf
            _log_ignored("the exclusiveness of oneOf")
        del made["oneOf"]
        if "anyOf" in made:
            made["allOf"] = [*as_list(made.get("allOf")), {"anyOf": branches}]
        else:
            made["anyOf"] = branches

    def _strings(self, made: Schema) -> None:
        """Replace look-ahead in a pattern with additional patterns. A text must match all of them."""
        pattern = made.get("pattern")
        if not isinstance(pattern, str) or not has_look_around(pattern):
            return
        equal = without_look_ahead(pattern)
        if equal is None:
            self._refuse(made, "pattern", f"the look-around or reference in the pattern {pattern!r:.200}")
            return
        made["pattern"], *others = equal
        if others:
            made["allOf"] = [*as_list(made.get("allOf")), *({"pattern": other} for other in others)]

    def _unique(self, made: Schema) -> None:
        """Enumerate all arrays if the items are unique and allow only a few values."""
        if "uniqueItems" not in made:
            return
        least, most, values = (
            made.get("minItems", 0),
            made.get("maxItems", _MAX_ARRAYS),
            self._document.values(made.get("items")),
        )
        if most in (0, 1):
            del made["uniqueItems"]
            return
        arrays = None
        if values and not made.keys() & {"prefixItems", "contains", "enum", "const"}:
            arrays = _enumerate_arrays(values, least, most)
        if arrays is None:
            self._refuse(made, "uniqueItems", "uniqueItems")
            self._limit_items(made, values)
            return
        for key in ("uniqueItems", "items", "minItems", "maxItems", "type"):
            made.pop(key, None)
        made["enum"] = arrays

    def _limit_items(self, made: Schema, values: list[Any]) -> None:
        """Limit the length of an array whose items should be unique, if that cannot be enforced. A small model would
        repeat an item without end."""
        least, most = made.get("minItems", 0), made.get("maxItems")
        different = len(values) or max(_MAX_ITEMS, len(as_list(made.get("prefixItems"))))
        if isinstance(least, int) and (most is None or (values and isinstance(most, int))):
            made["maxItems"] = max(least, different if most is None else min(different, most))

    def _names(self, made: Schema) -> None:
        """Replace propertyNames with properties or patternProperties."""
        if "propertyNames" not in made:
            return
        names = self._document.resolved(made["propertyNames"])
        conditions, values = set(names.keys() - _NOT_ABOUT_NAMES), self._document.values(names)
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
        """Remove look-ahead from patternProperties."""
        for pattern, value in as_mapping(made.get("patternProperties")).items():
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
        for key in ("then", "else"):  # they belong to `if`
            made.pop(key, None)

    def _refuse(self, made: Schema, key: str, said: str) -> None:
        if not self._lenient:
            raise ValueError(
                f'{said} cannot be enforced; {{"x-guidance": {{"lenient": true}}}} in the schema ignores it'
            )
        del made[key]
        _log_ignored(said)

    # Objects

    def _close(self, made: Schema, parts: list[Mapping[str, Any]], single: bool) -> None:
        """Forbid other keys in an object, unless one of its parts explicitly allows some.

        Args:
            made: The schema to change.
            parts: All schemas that describe the object.
            single: True if only one schema describes the object.
        """
        known: dict[str, Any] = {}
        for part in parts:
            if "additionalProperties" in part or part.get("unevaluatedProperties") not in (None, False):
                return
            known |= dict.fromkeys(as_mapping(part.get("properties")), True)
            known |= dict.fromkeys((name for name in as_list(part.get("required")) if isinstance(name, str)), True)
        if single and not made.keys() & {"type", "$ref", "allOf", "anyOf"}:
            made["type"] = "object"
        made["properties"] = {**known, **as_mapping(made.get("properties"))}
        made["additionalProperties"] = False

    def _objects(self, made: Schema, part: bool) -> bool:
        """Forbid other keys in an object. Return True if several schemas within `made` describe the object together.

        Args:
            made: The schema to change.
            part: See `_schema`.
        """
        if part:
            return True
        inner = [*as_list(made.get("allOf")), *([{"$ref": made["$ref"]}] if "$ref" in made else [])]
        described = sum(map(self._document.describes, [*inner, {"anyOf": as_list(made.get("anyOf"))}]))
        several = described + ("properties" in made) > 1 or "unevaluatedProperties" in made
        if several:
            self._group += 1
            self._separate(made)
        if several or "properties" in made:
            self._close(made, list(self._document.parts(made)), single=not several)
        if made.get("unevaluatedProperties") is False:
            del made["unevaluatedProperties"]
        return several

    def _separate(self, made: Schema) -> None:
        """Record the keys that each branch of a choice must not have, because only other branches have them.

        This is necessary because a closed object allows the keys of all branches.
        """
        for choice in [
            one[key] for one in self._document.parts(made) for key in ("anyOf", "oneOf") if as_list(one.get(key))
        ]:
            outside = _property_names(self._document.parts(made, without=choice))
            names = [_property_names(self._document.parts(branch)) for branch in choice]
            self._document.count(len(choice) * len(set().union(*names)))
            self._forbidden[id(choice)] = [
                {name: False for other in names for name in other if name not in own and name not in outside}
                for own in names
            ]

    def _inside(self, made: Schema, parts: bool) -> Schema:
        """Rewrite the schemas within `made`. `parts`: True if they describe the same object together."""
        for key in _KEYWORDS_WITH_MAPS:
            if isinstance(made.get(key), Mapping):
                made[key] = {name: self._schema(one) for name, one in made[key].items()}
        for key in _KEYWORDS_WITH_LISTS:
            if isinstance(made.get(key), list):
                forbidden = self._forbidden.get(id(made[key])) if parts else None
                made[key] = [self._schema(one, parts and key != "prefixItems") for one in made[key]]
                for one, keys in zip(made[key], forbidden or (), strict=False):
                    if isinstance(one, dict) and keys:
                        one["properties"] = {**keys, **as_mapping(one.get("properties"))}
        for key in _KEYWORDS_WITH_SCHEMA:
            if isinstance(made.get(key), list):
                made[key] = [self._schema(one) for one in made[key]]
            elif key in made:
                made[key] = self._schema(made[key])
        if parts and "$ref" in made:
            made["$ref"] = self._open_copy(made["$ref"])
        return made

    def _open_copy(self, reference: Any) -> Any:
        """Copy the target of a reference, but do not forbid other keys in the copy. Return a reference to the copy."""
        target = self._document.target(reference)
        if not self._document.describes(target):
            return reference
        key = reference, self._group
        if key not in self._open:
            name = f"open-{len(self._open)}"
            while name in as_mapping(self._document.root.get("$defs")):
                name += "-"
            self._open[key] = name
            inner = {key: value for key, value in target.items() if key not in ("$defs", "definitions", "x-guidance")}
            self._copies[name] = self._schema(inner, part=True)
        return f"#/$defs/{self._open[key]}"


def _property_names(parts: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Return the keys that these schemas describe, in order."""
    return {name: None for one in parts for name in as_mapping(one.get("properties"))}


def _enumerate_arrays(values: list[Any], least: Any, most: Any) -> list[list[Any]] | None:
    """Return all arrays of different values with these lengths, or None if there are too many."""
    if not isinstance(least, int) or not isinstance(most, int) or len(values) > _MAX_ARRAYS:
        return None
    sizes = range(least, min(most, len(values)) + 1)
    made = list(islice((list(array) for n in sizes for array in permutations(values, n)), _MAX_ARRAYS + 1))
    return made if len(made) <= _MAX_ARRAYS else None
