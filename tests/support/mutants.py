"""Plant small faults in the source, and report which ones the tests notice: `python -m tests.support.mutants --help`.

A fault is one changed token or one missing statement: a comparison that includes its bound, a sum that became a
difference, an `if` that is never taken, a call that is left out (a check, a rollback, a release). Faults are drawn at
random from each room with a seed, so the same commit and seed give the same faults. The room "native" is the C++ of the
kernels. Its faults are compiled for this processor first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS = {
    "cache": ["cache", "engine/test_prefix_cache.py", "test_session.py", "engine"],
    "certify": ["certify"],
    "checkpoints": ["checkpoints", "models"],
    "cli": ["cli"],
    "drafters": ["drafters", "engine", "recording"],
    "engine": ["engine", "test_llm.py", "test_testing.py"],
    "files": ["files", "cli"],
    "functional": ["functional"],
    "integrations": ["integrations"],
    "kernels": ["kernels", "cache", "models"],
    "learn": ["learn"],
    "models": ["models", "drafters", "checkpoints"],
    "native": ["kernels", "cache", "models"],
    "recording": ["recording", "cli/test_record.py"],
    "bench": ["bench", "recording", "cli"],
    "sampling": ["sampling", "engine", "verify"],
    "chat": ["server"],
    "server": ["server"],
    "text": ["text", "drafters/test_cross.py", "drafters/test_retokenizer.py", "server"],
    "train": ["train"],
    "vision": ["vision", "engine"],
    "verify": ["verify", "functional", "engine"],
    ".": ["test_llm.py", "test_session.py", "test_speculation.py", "test_testing.py", "test_seams.py", "engine"],
}
"""Folder under src/paceline -> its tests, most likely to notice a fault first. "." holds the root's modules."""

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}

NATIVE_SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "+": "-", "-": "+", "*": "+", "&&": "||"}
"""Operator between spaces in C++ -> its faulty replacement."""


@dataclass(frozen=True)
class Fault:
    """One change of a file: the text from `start` to `end` becomes `new`."""

    room: str
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


class _Finder(ast.NodeVisitor):
    """Collect every fault of a module, inside functions and outside error messages."""

    def __init__(self, source: str, file: str, room: str) -> None:
        self._lines = [0]
        for line in source.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._source, self._file, self._room = source.encode(), file, room
        self.found: list[Fault] = []
        self._depth = 0

    def _at(self, line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return self._lines[line - 1] + column

    def _add(self, node: ast.AST, start: int, end: int, new: str) -> None:
        line = self._source[:start].count(b"\n") + 1
        old = self._source[start:end].decode()
        if self._depth and old != new:
            self.found.append(Fault(self._room, self._file, line, start, end, old, new))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Swap the operator between two operands."""
        if type(operator) not in SWAPS:
            return
        old, new = SWAPS[type(operator)]
        start, end = self._span(left)[1], self._span(right)[0]
        at = self._source.find(old.encode(), start, end)
        if at >= 0:
            self._add(left, at, at + len(old), new)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        for statement in body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip the message of an error. Its condition can be a fault."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions, which are for the type checker."""

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self._between(left, right, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.Constant)
        if not any(isinstance(x, texts) and not _number(x) for x in (node.left, node.right)):
            self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node.values[0], node.values[1], node.op)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._add(node, *self._span(node.test), f"(False and ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._add(node, *self._span(node.func), "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        logs = isinstance(node.value, ast.Call) and "log" in ast.unparse(node.value.func).lower()
        if isinstance(node.value, ast.Call) and not logs:
            self._add(node, *self._span(node), "pass")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if _number(node) and isinstance(node.value, int):
            self._add(node, *self._span(node), str(node.value + 1))


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def faults_of(room: str) -> list[Fault]:
    """Return every fault that could be planted in a room."""
    package = ROOT / "src" / "paceline"
    if room == "native":
        return [fault for path in sorted((package / "kernels" / "cpu").glob("*.[hc]*")) for fault in _native(path)]
    files = package.glob("*.py") if room == "." else (package / room).rglob("*.py")
    found = []
    for path in sorted(files):
        source = path.read_text()
        finder = _Finder(source, str(path.relative_to(ROOT)), room)
        finder.visit(ast.parse(source))
        found += finder.found
    return found


def _native(path: Path) -> list[Fault]:
    """Return the faults of a C++ file: operators and whole numbers of code that every instruction set compiles."""
    found, start, depth, file = [], 0, 0, str(path.relative_to(ROOT))
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        depth += len(re.findall(r"^ *# *if", line)) - len(re.findall(r"^ *# *endif", line))
        code = line.split("//")[0]
        plain = not depth and not re.match(r" *(#|template|using|static_assert)", code)
        for match in re.finditer(r"(?<= )([<>=]=|[<>+*-]|&&)(?= )|(?<=[ (\[])\d+(?=[;,) \]])", code) if plain else ():
            old = match[0]
            at = start + len(line[: match.start()].encode())
            new = NATIVE_SWAPS.get(old) or str(int(old) + 1)
            found.append(Fault("native", file, number, at, at + len(old), old, new))
        start += len(line.encode())
    return found


def drawn(room: str, count: int, seed: int) -> list[Fault]:
    """Draw faults of a room. No two are on the same line, and all kinds are about equally frequent."""
    every, chosen = faults_of(room), dict[tuple[str, int], Fault]()
    dice = random.Random(f"{seed} {room}")
    dice.shuffle(every)
    kinds: dict[str, list[Fault]] = {}
    for fault in every:
        kinds.setdefault(fault.old if len(fault.old) < 4 else fault.new[:5], []).append(fault)
    queues = sorted(kinds.values(), key=len, reverse=True)
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                fault = queue.pop()
                chosen.setdefault((fault.file, fault.line), fault)
    return list(chosen.values())


def _run(source: Path, tests: Path, paths: list[str], marker: str, log: Path) -> int:
    """Run pytest on the faulty source in this process, which was forked for it. Never return."""
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tests)
    sys.path[:0] = [str(source), str(tests)]
    os.environ["PYTHONPATH"] = str(source)
    for name in [name for name in sys.modules if name.split(".")[0] in ("paceline", "tests")]:
        del sys.modules[name]
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marker, *paths])
    os._exit(int(code))


def judge(fault: Fault, tests: Path, marker: str, seconds: float) -> str:
    """Plant a fault in a copy of the source, run the room's tests, and return "killed", "survived", "timeout", or
    "invalid" for C++ that does not compile."""
    folder, library = Path(tempfile.mkdtemp(prefix="mutant-")), None
    try:
        source = folder / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        target = folder / fault.file
        text = target.read_bytes()
        target.write_bytes(text[: fault.start] + fault.new.encode() + text[fault.end :])
        if fault.room == "native" and (library := _compiled(source)) is None:
            return "invalid"
        paths = [f"tests/{path}" for path in TESTS[fault.room] if (tests / "tests" / path).exists()]
        pid = os.fork()
        if not pid:
            _run(source, tests, paths, marker, folder / "log")
        end = time.monotonic() + seconds
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "timeout"
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(done[1])
        return "survived" if code == 0 else "killed"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if library:
            library.unlink(missing_ok=True)


def _compiled(source: Path) -> Path | None:
    """Compile the kernels. Return the path of their library in the cache, or None if they do not compile."""
    code = "from paceline.kernels.cpu.build import find; print(find())"
    env = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def _read(path: Path) -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(path.read_text()) if fault.pop("result", "") == "survived"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", default=",".join(TESTS), help="comma-separated; default: all")
    parser.add_argument("--count", type=int, default=8, help="faults per room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests run (default: this one)")
    parser.add_argument("--marker", default="not slow", help="pytest marker expression; '' also runs slow tests")
    parser.add_argument("--seconds", type=float, default=600, help="time limit per fault")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--survivors", type=Path, help="run the survivors of an earlier result instead of drawing faults"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    args = parser.parse_args()
    # Imported before the fork, so that each run starts quickly. Do not import Paceline, which must be the faulty copy.
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    rooms = args.rooms.split(",")
    faults = _read(args.survivors) if args.survivors else [f for r in rooms for f in drawn(r, args.count, args.seed)]
    results: dict[Fault, str] = {}
    with ThreadPoolExecutor(args.workers) as pool:
        judged = pool.map(lambda fault: judge(fault, args.tests, args.marker, args.seconds), faults)
        for fault, result in _shown(faults, judged):
            results[fault] = result
            args.out.write_text(json.dumps([{**asdict(f), "result": r} for f, r in results.items()], indent=1))
    valid = [result for result in results.values() if result != "invalid"]
    print(f"{len(valid) - valid.count('survived')} of {len(valid)} faults noticed")


def _shown(faults: list[Fault], judged: Iterator[str]) -> Iterator[tuple[Fault, str]]:
    for fault, result in zip(faults, judged, strict=True):
        print(f"{result:9} {fault.file}:{fault.line}: {fault.old!r:.60} -> {fault.new!r:.40}", flush=True)
        yield fault, result


if __name__ == "__main__":
    main()
