"""Load test of the server: throughput, latency and correctness with many concurrent clients.

Clients in a closed loop send Spec-Bench questions to one server, alternately with and without speculation, and to the
other programs in `--against`. Throughput counts the tokens of `usage` while all clients are busy. Every reply must
equal the reply that a single client gets without speculation. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import PROMPTS, RESULTS, Question, load_prompts, pick, progress, provenance, report, write
from serve_figures import Table, Text, Turn, goal_grid, goals, summarise, text_of
from serve_systems import AUTO, LLAMA, LLAMA_EXTRA, OFF, Http, LoadRequest, OpenVino, System, llama_command
from tests.support.load_client import Load
from tests.support.server_process import ServerProcess, paceline_serve

from paceline.files.locate import resolve

PEER_PYTHON = Path("/tmp/peers/bin/python")
LLAMA_SERVER = Path("/tmp/llama-build/bin/llama-server")


def main() -> None:
    args = _arguments()
    questions = [q for q in load_prompts(args.questions) if len(q.text) <= args.longest]
    questions = pick(questions, args.prompts)
    turns: list[Turn] = []
    expected: dict[tuple[str | int, float], Text] = {}
    with ExitStack() as stack:
        systems = _systems(args, stack)
        _warm(systems, questions, args)
        try:
            for temperature in args.temperatures:
                expected |= _expected_replies(systems[0], questions, temperature, args)
                turns += _turns(systems, questions, temperature, args)
        finally:
            failed = _conclude(turns, expected, systems, args) if turns else True
    sys.exit(failed)


def _systems(args: argparse.Namespace, stack: ExitStack) -> list[System]:
    """Start Paceline's server, with speculation off and on, and then the other programs."""
    command = shlex.split(args.command or "") or paceline_serve(f"--model {args.model} {args.serve}")
    server = stack.enter_context(ServerProcess("paceline serve", command))
    found: list[System] = [Http(name, server, {"speculation": name}) for name in (OFF, AUTO)]
    if "llama.cpp" in args.against:
        command = llama_command(args.llama_server, resolve(args.model), args.threads, max(args.clients), args.context)
        found.append(Http(LLAMA, stack.enter_context(ServerProcess(LLAMA, command)), LLAMA_EXTRA))
    if "openvino" in args.against:
        found.append(stack.enter_context(_openvino(args)))
    return found


@contextmanager
def _openvino(args: argparse.Namespace) -> Iterator[OpenVino]:
    peer = OpenVino(args.peer_python, resolve(args.model), args.threads)
    try:
        yield peer
    finally:
        peer.close()


def _requests(
    questions: Sequence[Question], count: int, start: int, temperature: float, args: argparse.Namespace
) -> list[LoadRequest]:
    """Return `count` requests for successive questions, with different limits, so that clients do not run in step."""
    low, high = args.tokens
    places = [(start + i) % len(questions) for i in range(count)]
    return [
        LoadRequest(questions[p].id, questions[p].text, low + p * 7 % (high - low + 1), temperature, p) for p in places
    ]


def _warm(systems: Sequence[System], questions: Sequence[Question], args: argparse.Namespace) -> None:
    for system in systems:
        for clients in sorted({1, *args.clients}):
            requests = _requests(questions, clients, clients, max(args.temperatures), args)
            system.answer([LoadRequest(a.question, a.text, 24, a.temperature, a.seed) for a in requests], clients, 0.0)


def _expected_replies(
    system: System, questions: Sequence[Question], temperature: float, args: argparse.Namespace
) -> dict[tuple[str | int, float], Text]:
    """Return the replies to a single client without speculation."""
    requests = _requests(questions, len(questions), 0, temperature, args)
    replies = system.answer(requests, 1, 0.0).replies
    return {(a.question, temperature): text_of(r) for a, r in zip(requests, replies, strict=True)}


def _turns(
    systems: Sequence[System], questions: Sequence[Question], temperature: float, args: argparse.Namespace
) -> Iterator[Turn]:
    """Measure all numbers of clients in every turn, and for each number all systems in a rotating order."""
    cells = [(number, clients) for number in range(args.turns) for clients in args.clients]
    for place, (number, clients) in enumerate(progress(cells, f"T={temperature:g}")):
        count = max(args.least, args.each * clients)
        requests = _requests(questions, count, place * 5, temperature, args)
        for index in range(len(systems)):
            system = systems[(index + number) % len(systems)]
            before = system.processor_seconds()
            load: Load = system.answer(requests, clients, args.spacing)
            spent = system.processor_seconds() - before
            yield Turn(system.name, temperature, clients, number, requests, load, spent)


def _conclude(
    turns: Sequence[Turn],
    expected: dict[tuple[str | int, float], Text],
    systems: Sequence[System],
    args: argparse.Namespace,
) -> bool:
    """Write the result. Return True if a goal was missed."""
    cells = {(t.temperature, t.clients, s.name): [] for t in turns for s in systems}
    for turn in turns:
        cells[turn.temperature, turn.clients, turn.system].append(turn)
    table = Table([summarise(found, expected) for found in cells.values() if found])
    checked = goals(table, args.temperatures, args.clients)
    grids = [goal_grid(checked), *(table.grid(t) for t in dict.fromkeys(t.temperature for t in turns))]
    lines = list(_lines(turns, systems, args))
    report(grids, lines)
    result: dict[str, Any] = {"provenance": provenance(**vars(args)), "peers": _versions(systems, args)}
    result |= {"goals": [{"goal": g, "found": f, "held": h} for g, f, h in checked]}
    result |= {"summaries": table.rows, "turns": [t.as_dict() for t in turns]}
    write("serve", result, grids, lines, args.out)
    return not all(held for _, _, held in checked)


def _lines(turns: Sequence[Turn], systems: Sequence[System], args: argparse.Namespace) -> Iterator[str]:
    command = args.command or f"paceline serve --model {args.model} {args.serve}"
    yield f"`{command}`; {args.tokens[0]} to {args.tokens[1]} new tokens"
    yield f"clients start {args.spacing:g} s apart; latencies include requests during that time"
    for name, version in _versions(systems, args).items():
        yield f"{name}: {version}"
    errors = {r.error: t.system for t in turns for r in t.load.replies if r.error}
    yield from (f"{system} failed: {error}" for error, system in list(errors.items())[:10])


def _versions(systems: Sequence[System], args: argparse.Namespace) -> dict[str, str]:
    found = {
        s.name: f"{s.version}, continuous batching in its own process, no HTTP"
        for s in systems
        if isinstance(s, OpenVino)
    }
    if any(s.name == LLAMA for s in systems):
        said = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True)
        found[LLAMA] = (said.stdout + said.stderr).strip().splitlines()[0] + ", llama-server over HTTP"
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--serve",
        default="--quantize int8 --slots 48 --prefix-memory 0",
        help="additional options for `paceline serve`",
    )
    parser.add_argument("--command", help="command of another server to measure instead")
    parser.add_argument("--questions", type=Path, default=PROMPTS)
    parser.add_argument("--prompts", type=int, default=48, help="number of different questions")
    parser.add_argument("--longest", type=int, default=4000, help="maximum length of a question, in characters")
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[96, 128], help="lowest and highest token limit of replies"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32, 48])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--each", type=int, default=3, help="requests per client in a turn")
    parser.add_argument("--least", type=int, default=8, help="minimum number of requests per turn")
    parser.add_argument("--spacing", type=float, default=0.1, help="seconds between the starts of two clients")
    parser.add_argument("--against", nargs="*", choices=["openvino", "llama.cpp"], default=[])
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="path of a Python with openvino-genai")
    parser.add_argument("--llama-server", type=Path, default=LLAMA_SERVER, help="path of llama-server")
    parser.add_argument("--context", type=int, default=2048, help="context length per sequence in llama.cpp")
    parser.add_argument("--threads", type=int, default=2, help="threads of the other programs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.each < 2:
        parser.error("--each must be >= 2, because throughput is measured only while all clients are busy")
    return args


if __name__ == "__main__":
    main()
