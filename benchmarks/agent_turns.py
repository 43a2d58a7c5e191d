"""Measure coding agents with long prompts: time to first token of turn 1, turn 2, and turn 2 after a server restart.

Requests imitate Claude Code, Codex and opencode: a long system prompt, tools, and messages. They go to `paceline serve`
over HTTP. Turn 2 contains turn 1, its reply and another message. With --prefix-dir, the server keeps prefixes on disk,
if this version has the option. A second table shows the time to first token of a short request, on an idle server and
during a long prompt.

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
    """The request format of a coding agent.

    Attributes:
        path: URL path of its requests.
        body: Function from the system prompt and the messages (role, text) to the body of a request.
        first: Pattern that matches the first token in the stream.
        cached: Pattern that captures the number of cached tokens in the stream.
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
class TimedRequest:
    """A measured request: seconds to the first token, and prompt tokens that came from the prefix cache."""

    agent: str
    turn: str
    seconds: float
    cached: int = 0


async def first_token(port: int, agent: Agent, body: dict[str, Any], model: str) -> tuple[float, int]:
    """Send a request. Return the seconds to its first token, and its number of cached tokens."""
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


def turns(name: str, system: str, args: argparse.Namespace) -> list[TimedRequest]:
    """Send turn 1 and turn 2 of an agent, restart the server, and send turn 2 again."""
    agent, found = AGENTS[name], list[TimedRequest]()
    first_turn = [("user", "List the files of this folder and say what they are for.")]
    second_turn = [*first_turn, ("assistant", "There are two files."), ("user", "Read both, and fix what is wrong.")]
    for names in (TURNS[:2], TURNS[2:]):
        with server(args) as running:
            model = running.model()
            for turn in names:
                body = agent.body(system, first_turn if turn == TURNS[0] else second_turn)
                found.append(TimedRequest(name, turn, *asyncio.run(first_token(running.port, agent, body, model))))
    return found


def server(args: argparse.Namespace) -> ServerProcess:
    """Start `paceline serve`, with a long timeout because a restart reads the model again."""
    command = paceline_serve(f"--model {model_path(args.model)} {args.serve}")
    return ServerProcess("paceline serve", command, patience=600.0)


def during_long_prompt(system: str, args: argparse.Namespace) -> list[TimedRequest]:
    """Send a short request to an idle server, and then during the prefill of a long prompt."""
    agent, found = AGENTS["opencode"], list[TimedRequest]()
    short = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "stream": True}

    async def interrupt(port: int, model: str, number: int) -> TimedRequest:
        long = agent.body(f" Request {number}. {system}", [("user", "Go on.")])
        reading = asyncio.create_task(first_token(port, agent, long, model))
        await asyncio.sleep(args.delay)
        began = time.perf_counter()
        seconds, _ = await first_token(port, agent, short, model)
        late = reading.done()
        await reading
        if late:
            waited = time.perf_counter() - began
            fail(f"the long prompt ended before the short request, within {waited:.1f} s: use a longer --system")
        return TimedRequest("short request", "during a long prompt", seconds)

    with server(args) as running:
        model = running.model()
        asyncio.run(first_token(running.port, agent, short, model))  # warms up
        for number in range(args.repeats):
            seconds, _ = asyncio.run(first_token(running.port, agent, short, model))
            found += [
                TimedRequest("short request", "idle server", seconds),
                asyncio.run(interrupt(running.port, model, number)),
            ]
    return found


# Results


def grids(found: list[TimedRequest], names: list[str]) -> list[Grid]:
    def cell(agent: str, turn: str) -> str:
        own = [one for one in found if (one.agent, one.turn) == (agent, turn)]
        cached = f" ({own[-1].cached} cached)" if own[-1].cached else ""
        return f"{median([one.seconds for one in own]):.2f}{cached}"

    short = ("idle server", "during a long prompt")
    return [
        Grid(
            "Time to first token of an agent's turn, s",
            ["client", *TURNS],
            [[n, *(cell(n, t) for t in TURNS)] for n in names],
        ),
        Grid(
            "Time to first token of a short request, s",
            ["", *short],
            [["short request", *(cell("short request", t) for t in short)]],
        ),
    ]


def main() -> None:
    args = _arguments()
    path = model_path(args.model)
    (_, ids) = prompt_ids(str(path), [args.system])
    tokenizer = open_checkpoint(path).tokenizer
    source, found = provenance(**vars(args)), list[TimedRequest]()
    for number in progress(range(args.repeats), "turns"):
        for name in args.agents:
            # Each repetition uses a new prompt, so that the cache does not contain it yet.
            found += turns(name, f" Session {number}, {time.time_ns()}. {tokenizer.decode(ids)}", args)
    found += during_long_prompt(tokenizer.decode(ids), args)
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
    parser.add_argument("--repeats", type=int, default=3, help="number of repetitions (3)")
    parser.add_argument("--serve", default="", help="additional options for `paceline serve`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
