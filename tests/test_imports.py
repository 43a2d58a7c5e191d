"""The order of the rooms: every module imports only from rooms below it, without circular imports."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
ROOT = {"__init__", "__main__", "errors", "types", "protocols", "session", "speculation", "llm"}
ORDER = (
    *(
        "errors",
        "types",
        "protocols",
        "files",
        "text",
        "cache",
        "kernels",
        "sampling",
        "chat",
        "verify",
        "models",
    ),
    *(
        "vision",
        "checkpoints",
        "drafters",
        "engine",
        "recording",
        "session",
        "speculation",
        "llm",
        "__init__",
        "testing",
        "functional",
        "train",
    ),
    *("bench", "learn", "server", "certify", "cli", "integrations", "__main__"),
)
"""Rooms and root modules, bottom to top."""
Graph = Mapping[str, set[str]]


def read(source: Path) -> dict[str, ast.Module]:
    """Syntax trees by module name below the package: "engine.results", "engine" for its __init__."""
    found = {}
    for path in sorted(source.glob("**/*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text())
    return found


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield statements at any depth. Expressions, nine tenths of all nodes, contain none."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        yield (node := waiting.pop())
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def imported(tree: ast.Module, modules: Mapping[str, object], package: str = "paceline") -> Iterator[str]:
    """Return all modules of the package that a module imports: at the top, for types only, or inside functions."""
    names = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name == package:
            yield "__init__"
        elif name.startswith(package + "."):
            inner = name.removeprefix(package + ".")
            parent = inner.rpartition(".")[0]
            yield inner if inner in modules else parent if parent in modules else "__init__"


def graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    return {name: set(imported(tree, trees)) - {name} for name, tree in trees.items()}


def circle(edges: Graph) -> list[str]:
    """Return one circle of imports, or an empty result."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def climbs(edges: Graph) -> list[str]:
    """Return imports of a room from a room above it."""
    room = {name: name.partition(".")[0] for name in edges}
    return sorted(
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in others
        if ORDER.index(room[name]) < ORDER.index(room[other])
    )


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return read(SOURCE)


def test_a_room_imports_only_rooms_below_it_and_nothing_in_a_circle(trees: dict[str, ast.Module]) -> None:
    edges = graph(trees)
    assert len(edges) > 200
    assert circle(edges) == []
    assert climbs(edges) == []


def test_the_root_holds_few_modules(trees: dict[str, ast.Module]) -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == ROOT
    assert len(ROOT) <= 8
    assert {name.partition(".")[0] for name in trees} == set(ORDER), "every room has its place in the order"


def test_no_class_name_stands_twice(trees: dict[str, ast.Module]) -> None:
    classes = [node for tree in trees.values() for node in statements(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name.lstrip("_") for node in classes)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    "back",
    [
        "from paceline.engine.a import x",
        "import paceline.engine.a",
        "from paceline.engine import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from paceline.engine.a import X",
        "def late():\n    from paceline.engine.a import x",
    ],
)
def test_a_circle_is_found_however_it_is_written(back: str) -> None:
    sources = {"engine.a": "from paceline.verify.b import y", "verify.b": back, "engine": "", "verify": ""}
    edges = graph({name: ast.parse(source) for name, source in sources.items()})
    assert set(circle(edges)) == {"engine.a", "verify.b"}
    assert climbs(edges) == ["verify.b imports engine.a"]
    sources["verify.b"] = ""
    edges = graph({name: ast.parse(source) for name, source in sources.items()})
    assert circle(edges) == climbs(edges) == []
