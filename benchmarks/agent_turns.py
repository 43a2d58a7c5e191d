"""Agents' turns at length: seconds to the first token of turn 1, turn 2, and turn 2 after a restart of the server.

Requests have the form of Claude Code, Codex and opencode: a long system prompt, tools, and messages. They go to
`paceline serve` over HTTP. Turn 2 repeats turn 1 with its reply and a further message. With --prefix-dir, prefixes are
kept on disk, where this version has the option. A second table has the time to the first token of a short request,
alone and while a long prompt is being read.

    python benchmarks/agent_turns.py --model 1.5b --serve "--prefix-dir /tmp/prefixes"
    python benchmarks/agent_turns.py --model demo --system 1500 --repeats 1
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, fail, median, progress, provenance, report, write
from real_models import model_path, prompt_ids
from tests.support.agents import CLAUDE, CLAUDE_PATH, CODEX
from tests.support.load_client import Client, Exchange
from tests.support.server_process import ServerProcess, paceline_serve

from paceline.checkpoints.checkpoint import open_checkpoint

TURNS = ("turn 1", "turn 2", "turn 2 after a restart")
CHAT = "/v1/chat/completions"
_DESCRIPTION = "Runs a command in the user's shell and returns its output. Quote paths. Never run it without a reason."


@dataclass(frozen=True, slots=True)
class Agent:
    """A client.

    Attributes:
        path: Path of its requests.
        body: Makes a request from (system prompt, messages as (role, text)).
        first: Pattern of the first token in the stream.
        cached: Pattern of the number of cached tokens in the stream.
    """

    path: str
    body: Callable[[str, list[tuple[str, str]]], dict[str, Any]]
    first: bytes
    cached: bytes


def claude(system: str, messages: list[tuple[str, str]]) -> dict[str, Any]:
    body = copy.deepcopy(CLAUDE)
    body["system"][-1]["text"] += system
    body["messages"] = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in messages]
    return body | {"max_tokens": 32}


def codex(system: str, messages: list[tuple[str, str]]) -> dict[str, Any]:
    body = copy.deepcopy(CODEX)
    kinds = {"user": "input_text", "assistant": "output_text"}
    said = [
        {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]} for role, text in messages
    ]
    body["input"] = [*body["input"][:-1], *said]
    return body | {"instructions": body["instructions"] + system, "max_output_tokens": 32}


def opencode(system: str, messages: list[tuple[str, str]]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    names = ("bash", "edit", "glob", "grep", "list", "read", "todowrite", "webfetch", "write")
    tools = [{"name": name, "description": _DESCRIPTION, "parameters": schema} for name in names]
    said = [{"role": role, "content": text} for role, text in messages]
    return {
        "messages": [{"role": "system", "content": "You are opencode." + system}, *said],
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


AGENTS = {
    "claude code": Agent(CLAUDE_PATH, claude, rb'"content_block_delta"', rb'"cache_read_input_tokens": ?(\d+)'),
    "codex": Agent("/v1/responses", codex, rb'\.delta"', rb'"cached_tokens": ?(\d+)'),
    "opencode": Agent(
        CHAT, opencode, rb'"(content|reasoning_content)": ?"[^"]|"tool_calls"', rb'"cached_tokens": ?(\d+)'
    ),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: seconds to the first token, and prompt tokens that were not read again."""

    agent: str
    turn: str
    seconds: float
    cached: int = 0


async def first_token(port: int, agent: Agent, body: dict[str, Any], model: str) -> tuple[float, int]:
    """Return the seconds to the first token of a request, and its cached tokens."""
    client, times = Client(port, timeout=3600.0), list[float]()

    async def note(found: Exchange) -> bool:
        if not times and re.search(agent.first, found.body):
            times.append(found.parts[-1][0] - found.began)
        return False

    found = await client.ask(agent.path, json.dumps(body | {"model": model}).encode(), note)
    client.close()
    if found.status != 200 or found.error or not times:
        fail(f"{agent.path} answered {found.status} {found.error} {found.body[-500:]!r}")
    cached = re.findall(agent.cached, found.body)
    return times[0], int(cached[-1]) if cached else 0


# Turns


def turns(name: str, system: str, args: argparse.Namespace) -> list[Asked]:
    """Ask turn 1 and turn 2 of an agent, restart the server, and ask turn 2 again."""
    agent, found = AGENTS[name], list[Asked]()
    beginning = [("user", "List the files of this folder and say what they are for.")]
    going_on = [*beginning, ("assistant", "There are two files."), ("user", "Read both, and fix what is wrong.")]
    for names in (TURNS[:2], TURNS[2:]):
        with server(args) as running:
            model = running.model()
            for turn in names:
                body = agent.body(system, beginning if turn == TURNS[0] else going_on)
                found.append(Asked(name, turn, *asyncio.run(first_token(running.port, agent, body, model))))
    return found


def server(args: argparse.Namespace) -> ServerProcess:
    """Start `paceline serve`. A restart may take long, since it reads the model again."""
    command = paceline_serve(f"--model {model_path(args.model)} {args.serve}")
    return ServerProcess("paceline serve", command, patience=600.0)


def beside(system: str, args: argparse.Namespace) -> list[Asked]:
    """Ask a short question of an idle server, and then while a long prompt is being read."""
    agent, found = AGENTS["opencode"], list[Asked]()
    short = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "stream": True}

    async def both(port: int, model: str, number: int) -> Asked:
        long = agent.body(f" Request {number}. {system}", [("user", "Go on.")])
        reading = asyncio.create_task(first_token(port, agent, long, model))
        await asyncio.sleep(args.delay)
        began = time.perf_counter()
        seconds, _ = await first_token(port, agent, short, model)
        late = reading.done()
        await reading
        if late:
            fail(f"the long prompt had been read after {time.perf_counter() - began:.1f} s: use a longer --system")
        return Asked("short request", "beside a long prompt", seconds)

    with server(args) as running:
        model = running.model()
        asyncio.run(first_token(running.port, agent, short, model))  # warms up
        for number in range(args.repeats):
            seconds, _ = asyncio.run(first_token(running.port, agent, short, model))
            found += [Asked("short request", "alone", seconds), asyncio.run(both(running.port, model, number))]
    return found


# Results


def grids(found: list[Asked], names: list[str]) -> list[Grid]:
    def cell(agent: str, turn: str) -> str:
        own = [one for one in found if (one.agent, one.turn) == (agent, turn)]
        cached = f" ({own[-1].cached} cached)" if own[-1].cached else ""
        return f"{median([one.seconds for one in own]):.2f}{cached}"

    short = ("alone", "beside a long prompt")
    return [
        Grid(
            "First token of an agent's turn, s", ["client", *TURNS], [[n, *(cell(n, t) for t in TURNS)] for n in names]
        ),
        Grid(
            "First token of a short request, s",
            ["", *short],
            [["short request", *(cell("short request", t) for t in short)]],
        ),
    ]


def main() -> None:
    args = _arguments()
    path = model_path(args.model)
    (_, ids) = prompt_ids(str(path), [args.system])
    tokenizer = open_checkpoint(path).tokenizer
    source, found = provenance(**vars(args)), list[Asked]()
    for number in progress(range(args.repeats), "turns"):
        for name in args.agents:
            # Each repetition has another prompt, which no earlier one has left in the cache.
            found += turns(name, f" Session {number}, {time.time_ns()}. {tokenizer.decode(ids)}", args)
    found += beside(tokenizer.decode(ids), args)
    tables = grids(found, args.agents)
    report(tables)
    result = {"provenance": source, "asked": [asdict(one) for one in found]}
    write(f"agent-turns-{path.stem}", result, tables, folder=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5b", help="demo, 1.5b, 0.5b, a GGUF file or a folder (1.5b)")
    parser.add_argument("--agents", nargs="+", default=[*AGENTS], choices=[*AGENTS])
    parser.add_argument("--system", type=int, default=12_000, help="tokens of the system prompt (12000)")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds from the long request to the short one (0.5)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything (3)")
    parser.add_argument("--serve", default="", help="further options of `paceline serve`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
