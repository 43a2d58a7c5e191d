"""Record the demo model's exact output before a refactoring, and compare with it afterwards.

    python benchmarks/fingerprint.py --out before.json
    python benchmarks/fingerprint.py --against before.json

The output is the token ids and log-probabilities for 40 prompts, greedy and sampled, in bfloat16 and with the file's
own quantised weights. Prompts are answered one by one with every drafter, in a batch, and by a server. Every drafter
must write the same text as plain decoding. The script uses only the public API and the command line, so that it runs
unchanged before and after the refactoring. Outputs of different machines are not comparable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paceline

PROMPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "spec_bench_dev.jsonl"
DRAFTERS = ("suffix", "ngram", "eagle3", "medusa", "early-exit:20", "model:demo", "suffix+eagle3")
SAMPLED = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}
PRECISIONS = {"bfloat16": "none", "own codes": "int8"}

Reply = tuple[list[int], str]
"""Token ids, and a digest of their log-probabilities."""


def prompts(count: int) -> list[str]:
    """Return `count` questions, spread over the whole file."""
    if not PROMPTS.exists():
        raise SystemExit(f"error: {PROMPTS} does not exist: this script needs the `shared` folder next to the checkout")
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0][:1500] for line in lines[:: max(1, len(lines) // count)]][:count]


def digest(logprobs: Sequence[Any]) -> str:
    values = [(one.chosen.hex(), [(token, value.hex()) for token, value in one.top]) for one in logprobs]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def written(llm: paceline.LLM, asked: Sequence[str], tokens: int, how: dict[str, Any]) -> list[Reply]:
    """Answer the prompts one by one."""
    sampling = paceline.Sampling(max_new_tokens=tokens, logprobs=2, **how)
    found = []
    for prompt in asked:
        chunks = list(llm.stream(prompt, sampling))
        found.append(([chunk.token_id for chunk in chunks], digest([chunk.logprobs for chunk in chunks])))
    return found


def batched(llm: paceline.LLM, asked: Sequence[str], tokens: int, how: dict[str, Any]) -> list[Reply]:
    """Answer all prompts in one batch."""
    sampling = paceline.Sampling(max_new_tokens=tokens, logprobs=2, **how)
    chunks: list[list[Any]] = [[] for _ in asked]
    with llm.batch(asked, sampling, width=16) as batch:
        for index, chunk in batch:
            chunks[index].append(chunk)
    return [([chunk.token_id for chunk in one], digest([chunk.logprobs for chunk in one])) for one in chunks]


@contextmanager
def server(quantize: str) -> Iterator[str]:
    """Serve the demo model. Yield the server's address."""
    command = [sys.executable, "-m", "paceline", "serve", "--model", "demo", "--port", "0"]
    command += ["--quantize", quantize]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            yield next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            process.terminate()


def served(address: str, asked: Sequence[str], tokens: int, how: dict[str, Any]) -> list[list[str]]:
    """Return tokens and log-probabilities as the server reports them."""
    found = []
    for prompt in asked:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "logprobs": True, **how}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
        found.append([f"{one['token']} {one['logprob']!r}" for one in choice["logprobs"]["content"]])
    return found


def fingerprint(count: int, tokens: int, drafters: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the output by precision and sampling, and a line for each drafter or batch that differed from it."""
    asked, found, wrong = prompts(count), {}, []
    for precision, quantize in PRECISIONS.items():
        plain = paceline.load("demo", drafter=None, quantize=quantize, prefix_memory=0)
        found[precision] = {name: written(plain, asked, tokens, how) for name, how in SAMPLED.items()}
        for name, how in SAMPLED.items():
            if batched(plain, asked, tokens, how) != found[precision][name]:
                wrong.append(f"{precision}, {name}, batch")
        for drafter in drafters:
            llm = paceline.load("demo", drafter=drafter, quantize=quantize, prefix_memory=0)
            for name, how in SAMPLED.items():
                if written(llm, asked, tokens, how) != found[precision][name]:
                    wrong.append(f"{precision}, {name}, {drafter}")
            print(f"{precision}: {drafter}", file=sys.stderr)
        with server(quantize) as address:
            few = asked[::5]
            found[f"{precision}, served"] = {name: served(address, few, tokens, how) for name, how in SAMPLED.items()}
    return found, wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the output to this file")
    parser.add_argument("--against", type=Path, help="compare with this file")
    parser.add_argument("--prompts", type=int, default=40, help="number of prompts (40)")
    parser.add_argument("--tokens", type=int, default=32, help="maximum new tokens per reply (32)")
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS, help=f"drafters ({' '.join(DRAFTERS)})")
    args = parser.parse_args(arguments)
    found, wrong = fingerprint(args.prompts, args.tokens, args.drafters)
    if args.out:
        args.out.write_text(json.dumps(found), encoding="utf-8")
    for line in wrong:
        print(f"differs from plain decoding: {line}")
    if args.against:
        before = json.loads(args.against.read_text(encoding="utf-8"))
        same = json.loads(json.dumps(found)) == before
        print("identical to the recorded output" if same else "DIFFERENT from the recorded output")
        return int(bool(wrong) or not same)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
