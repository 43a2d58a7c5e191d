"""MkDocs hooks: pages generated from the code, and links from a page to files outside docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import cli_reference  # next to this file, where mkdocs looks while it loads a hook
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_LINK = re.compile(r"\]\((?!https?:|mailto:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(```.*?```)", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, below repo/: results, examples, sources."""
    pages = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while pages:
        source, text = pages.pop()
        for target, _ in _LINK.findall(text):
            path = _resolve(source, target)
            uri = f"repo/{path}"
            if path.startswith("docs/") or uri in files.src_uris or not (ROOT / path).is_file():
                continue
            files.append(file := File.generated(config, uri, abs_src_path=str(ROOT / path)))
            if file.is_documentation_page():
                pages.append((path, file.content_string))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert generated content, and point links that leave docs/ at the copies below repo/."""
    uri = page.file.src_uri
    source = uri.removeprefix("repo/") if uri.startswith("repo/") else f"docs/{uri}"

    def relink(link: re.Match[str]) -> str:
        path = _resolve(source, link[1])
        target = path.removeprefix("docs/") if path.startswith("docs/") else f"repo/{path}"
        return f"]({os.path.relpath(target, os.path.dirname(uri))}{link[2] or ''})"

    parts = _CODE.split(markdown)
    markdown = "".join(part if part.startswith("```") else _LINK.sub(relink, part) for part in parts)
    return _MARK.sub(lambda mark: _GENERATED[mark[1]](), markdown)


def _resolve(source: str, target: str) -> str:
    """Return the path of a link in `source`, relative to the repository's root."""
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def command_line() -> str:
    """Return every command with its options."""
    return cli_reference.markdown().partition("\n")[2].replace("\\<", "&lt;")


def environment() -> str:
    """Return the table of environment variables."""
    return cli_reference.environment()


def openapi() -> str:
    """Return the server's paths and request bodies, from its own OpenAPI document."""
    from paceline.server.app import create_app
    from paceline.server.description import describe
    from paceline.server.limits import Settings

    document = describe(create_app(MagicMock(), Settings()))
    out = ["| path | |", "|---|---|"]
    for path, methods in document["paths"].items():
        out += [f"| `{verb.upper()} {path}` | {what.get('description', '')} |" for verb, what in methods.items()]
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            out += ["", f"### {name}", "", "| field | type | |", "|---|---|---|"]
            for field, what in schema["properties"].items():
                required = "**required** " if field in schema.get("required", ()) else ""
                told = what.get("description", "").replace("\n", " ").replace("|", "\\|")
                out.append(f"| `{field}` | {_kind(what)} | {required}{told} |")
    return "\n".join(out)


def _kind(schema: dict[str, Any]) -> str:
    """Name the type of a JSON schema, with its bounds."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{one!r}`" for one in schema.get("enum", [schema.get("const")]) if one is not None)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}))}"
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " ".join([kind, *(f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema)])


_GENERATED = {"cli": command_line, "environment": environment, "openapi": openapi}
