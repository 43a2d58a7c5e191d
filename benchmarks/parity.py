"""Check the demo model's replies to Spec-Bench questions in two comparisons. Exit code 1 if either fails.

a) float32, greedy: compare Paceline without drafting with transformers' `generate`. Each has its own GGUF reader. Both
   get the same token ids and end tokens. Prompts that transformers would tokenise differently are listed. Replies may
   diverge only at a near tie in transformers, if our token is within `LIMIT` of its choice. Every divergence is listed.
b) bfloat16, greedy and seeded: compare every drafter with drafter=None, token id by token id. No difference is excused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, Question, fail, load_prompts, pick, progress, provenance, report, write
from torch import Tensor

import paceline
from paceline import LLM, Completion, DraftBudget, Sampling
from paceline.bench.peers import Transformers
from paceline.checkpoints.loader import Loaded
from paceline.drafters.factory import make_drafter

LIMIT = 1e-3
"""Logit margin below which float32 rounding may change the token."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position where two sequences differ, such as the end of the shorter one, or None."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference of a reply from the reference.

    Attributes:
        prompt: Id of the prompt.
        position: Position of the difference in the reply.
        ours: Token of our reply, or None after its end.
        theirs: Token of the reference, or None after its end.
        margin: Difference between the reference's two best logits at this position.
        gap: Difference between the reference's logits of `theirs` and `ours`.
        excused: True for a near tie that rounding may decide either way.
    """

    prompt: int | str
    position: int
    ours: int | None
    theirs: int | None
    margin: float | None
    gap: float | None
    excused: bool


def classify(
    prompt: int | str, ours: Sequence[int], theirs: Sequence[int], logits: Sequence[Tensor], limit: float
) -> Divergence | None:
    """Return the first divergence of `ours` from `theirs`, or None.

    The reference chose `theirs[i]` from `logits[i]` [V]. A divergence is excused only if our token's logit is within
    `limit` of the reference's choice. Checking only the top-2 margin would also excuse any third token. A text that
    ends early or late is never excused.
    """
    at = first_difference(ours, theirs)
    if at is None:
        return None
    mine = ours[at] if at < len(ours) else None
    other = theirs[at] if at < len(theirs) else None
    if other is None:
        return Divergence(prompt, at, mine, None, None, None, False)
    row = logits[at].double()
    best = torch.topk(row, 2).values
    margin = float(best[0] - best[1])
    gap = None if mine is None else float(row[other] - row[mine])
    return Divergence(prompt, at, mine, other, margin, gap, gap is not None and max(margin, gap) < limit)


@dataclass(frozen=True, slots=True)
class Config:
    """A drafter and its draft budget. A `costly` drafter uses the target as its draft model and gets fewer prompts."""

    name: str
    drafter: str
    draft: DraftBudget
    costly: bool = False


CONFIGS = [
    Config("ngram chain", "ngram", DraftBudget.chain(7)),
    Config("suffix chain", "suffix", DraftBudget.chain(7)),
    Config("suffix tree", "suffix", DraftBudget(nodes=15, depth=8, branch=3)),
    Config("stack ngram+suffix", "ngram+suffix", DraftBudget(nodes=12, depth=6, branch=2)),
    Config("model:demo chain", "model:demo", DraftBudget.chain(4), costly=True),
    Config("model:demo tree", "model:demo", DraftBudget(nodes=8, depth=3, branch=3), costly=True),
    Config("stack ngram+model:demo", "ngram+model:demo", DraftBudget.chain(4), costly=True),
]


def samplings(tokens: int) -> dict[str, Sampling]:
    """Return greedy decoding and seeded sampling with truncation."""
    return {
        "greedy": Sampling(max_new_tokens=tokens),
        "T=0.8 top_p=.95": Sampling(max_new_tokens=tokens, temperature=0.8, top_p=0.95, seed=20),
    }


def against_transformers(prompts: Sequence[Question], tokens: int) -> dict[str, Any]:
    """Run comparison a. In the result, `divergences` include excused ones, and `failures` do not."""
    llm = paceline.load("demo", dtype="float32", device="cpu", drafter=None)
    if llm.model.path.suffix != ".gguf":
        fail(f"{llm.model.path} is not a GGUF file, but transformers must read the same file")
    peer = Transformers(llm.model.path, torch.float32)
    eos = set(llm.model.eos)
    known = peer.model.generation_config.eos_token_id
    # A GGUF file has one EOS id, so transformers also gets the other end tokens that Paceline knows.
    failures = [] if set(known if isinstance(known, list) else [known]) <= eos else [f"EOS ids: {eos}, theirs {known}"]
    divergences: list[Divergence] = []
    other_ids, compared = [], 0
    for prompt in progress(prompts, "float32, transformers"):
        ids = llm.encode(prompt.text)
        # transformers' GGUF reader omits SmolLM2's splitting of digits (tests/text/test_tokenizer.py adds it and finds
        # no difference), so both get the ids of the model's tokenizer, and prompts where it matters are listed.
        message = [{"role": "user", "content": prompt.text}]
        templated = peer.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        if list(templated["input_ids"]) != ids:
            other_ids.append(prompt.id)
        ours = llm.generate(ids, Sampling(max_new_tokens=tokens)).token_ids
        out = peer.generate(ids, tokens, llm.model.eos, output_logits=True, return_dict_in_generate=True)
        theirs = out.sequences[0, len(ids) :].tolist()
        found = classify(prompt.id, ours, theirs, [row[0] for row in out.logits], LIMIT)
        compared += len(theirs) if found is None else found.position + 1
        divergences += [found] if found else []
    failures += [describe(d) for d in divergences if not d.excused]
    return {
        "prompts": len(prompts),
        "tokens_compared": compared,
        "tokenised_differently_by_transformers": other_ids,
        "divergences": [asdict(d) for d in divergences],
        "failures": failures,
    }


def describe(d: Divergence) -> str:
    """Return a divergence as one line."""
    numbers = "one text ends" if d.margin is None else f"top-2 margin {d.margin:.2e}"
    gap = "" if d.gap is None else f", gap to ours {d.gap:.2e}"
    verdict = "excused" if d.excused else "NOT EXCUSED"
    return f"prompt {d.prompt}, position {d.position}: ours {d.ours}, theirs {d.theirs}, {numbers}{gap}: {verdict}"


def against_plain(prompts: Sequence[Question], tokens: int, costly: int) -> list[dict[str, Any]]:
    """Run comparison b. Return one entry per drafter and sampling."""
    plain = paceline.load("demo", dtype="bfloat16", device="cpu", drafter=None)
    results = []
    for name, sampling in samplings(tokens).items():
        reference = _texts(plain, prompts, sampling, f"bfloat16, {name}, no drafter")
        results.append(_compare("none", name, plain, prompts, reference, reference))
        for config in CONFIGS:
            asked = prompts[:costly] if config.costly else prompts
            llm = _drafting(plain.model, config)
            texts = _texts(llm, asked, sampling, f"bfloat16, {name}, {config.name}")
            results.append(_compare(config.name, name, llm, asked, texts, reference))
    return results


def _drafting(loaded: Loaded, config: Config) -> LLM:
    """Return the same weights with a drafter. A draft model is the target itself with a second cache."""
    return LLM(loaded, make_drafter(config.drafter, loaded, lambda reference: loaded), config.draft)


def _texts(llm: LLM, prompts: Sequence[Question], sampling: Sampling, title: str) -> list[Completion]:
    return [llm.generate(prompt.text, sampling) for prompt in progress(prompts, title)]


def _compare(
    drafter: str,
    sampling: str,
    llm: LLM,
    prompts: Sequence[Question],
    texts: Sequence[Completion],
    reference: Sequence[Completion],
) -> dict[str, Any]:
    pairs = list(zip(prompts, texts, reference, strict=False))
    differences = [(p.id, first_difference(a.token_ids, b.token_ids)) for p, a, b in pairs]
    differ = [{"prompt": prompt, "position": at} for prompt, at in differences if at is not None]
    rounds, drafted = sum(t.stats.rounds for t in texts), sum(t.stats.drafted for t in texts)
    tokens = sum(len(t.token_ids) for t in texts)
    return {
        "drafter": drafter,
        "sampling": sampling,
        "prompts": len(texts),
        "tokens": tokens,
        "identical": len(texts) - len(differ),
        "differences": differ,
        "tokens_per_round": round(tokens / rounds, 3),
        "acceptance": round(sum(t.stats.accepted for t in texts) / drafted, 3) if drafted else None,
        "guarantee": llm.guarantee,
    }


def grid_a(result: dict[str, Any]) -> Grid:
    found = result["divergences"]
    excused = sum(d["excused"] for d in found)
    row = [result["prompts"], result["tokens_compared"], len(found), excused, len(result["failures"])]
    columns = ["prompts", "tokens compared", "divergences", "excused", "failures"]
    return Grid("a) float32, greedy, compared with transformers", columns, [[str(x) for x in row]])


def grid_b(results: Sequence[dict[str, Any]]) -> Grid:
    rows = [
        [
            r["drafter"],
            r["sampling"],
            f"{r['identical']}/{r['prompts']}",
            str(r["tokens"]),
            f"{r['tokens_per_round']:.2f}",
            "-" if r["acceptance"] is None else f"{r['acceptance']:.2f}",
            r["guarantee"],
        ]
        for r in results
    ]
    columns = ["drafter", "sampling", "identical texts", "tokens", "tokens/round", "acceptance", "guarantee"]
    return Grid("b) bfloat16, drafters compared with plain decoding", columns, rows)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=int, default=40, help="number of questions, spread evenly over the categories (40)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="maximum new tokens per reply (96)")
    parser.add_argument(
        "--costly-prompts", type=int, default=6, help="number of questions for drafters that use the model itself (6)"
    )
    parser.add_argument("--only", choices=["a", "b"], help="run only this comparison")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    prompts = pick(load_prompts(), args.prompts)
    result: dict[str, Any] = {"provenance": provenance(**vars(args), limit=LIMIT, configs=[asdict(c) for c in CONFIGS])}
    grids, lines, right = [], [], True
    if args.only != "b":
        part = result["float32"] = against_transformers(prompts, args.tokens)
        grids.append(grid_a(part))
        lines += [describe(Divergence(**d)) for d in part["divergences"]]
        lines += [f for f in part["failures"] if "NOT EXCUSED" not in f]
        right = not part["failures"]
    if args.only != "a":
        parts = result["bfloat16"] = against_plain(prompts, args.tokens, args.costly_prompts)
        grids.append(grid_b(parts))
        lines += [f"{p['drafter']}, {p['sampling']}: differs at {p['differences']}" for p in parts if p["differences"]]
        right = right and not any(p["differences"] for p in parts)
    lines.append("parity holds" if right else "PARITY FAILS")
    result["ok"] = right
    report(grids, lines)
    write("parity" if args.only is None else f"parity-{args.only}", result, grids, lines, args.out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
