"""Built-in prompts of 13 kinds, generated from a seed. Their length ranges from one line to 8,000 tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt with its kind and a name, such as "code 3"."""

    kind: str
    name: str
    text: str


_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana", "Ivo", "Jun")
_THINGS = ("lamps", "maps", "apples", "bolts", "kites", "violins", "ropes", "tiles", "boats", "pens")
_PLACES = ("Lima", "Oslo", "Kyoto", "Accra", "Quito", "Hobart", "Tunis", "Riga", "Pune", "Cork")
_TOPICS = (
    *("rainbows", "tides", "rust", "yeast", "magnets", "glaciers", "the printing press", "sundials", "coral reefs"),
    *("double-entry bookkeeping", "bicycles", "vaccines", "paper", "earthquakes", "bees", "salt", "compasses"),
)
_FUNCTIONS = (
    *(
        "merges two sorted lists",
        "reverses the words of a sentence",
        "counts vowels",
        "finds the second largest number",
    ),
    *("checks if brackets are balanced", "parses a date such as 2024-05-17", "computes a moving average"),
    *("removes duplicates and keeps the order", "converts Roman numerals", "rotates a matrix by 90 degrees"),
)
_SENTENCES = (
    ("German", "Erkläre in drei Sätzen, warum {} wichtig sind oder waren."),
    ("French", "Explique en trois phrases à quoi sert ceci : {}."),
    ("Spanish", "Escribe tres frases sobre este tema: {}."),
    ("Japanese", "次のテーマについて三つの文で説明してください。{}"),
    ("Chinese", "请用三句话介绍{}。"),
    ("Arabic", "اكتب ثلاث جمل عن هذا الموضوع: {}"),
    ("Russian", "Напиши три предложения на тему: {}."),
    ("Hindi", "इस विषय पर तीन वाक्य लिखिए: {}"),
)
_EMOJI = ("🚲", "🌧️", "👩‍🚀", "🍎", "🦊", "🎻", "🏔️", "❤️‍🔥", "🇳🇿", "⚙️")


def _question(draw: random.Random) -> str:
    return f"Explain {draw.choice(_TOPICS)} to a {draw.randint(8, 80)}-year-old in one paragraph."


def _code(draw: random.Random) -> str:
    language = draw.choice(("Python", "C", "Rust", "JavaScript", "SQL"))
    return f"Write a function in {language} that {draw.choice(_FUNCTIONS)}. Show one example call."


def _edit(draw: random.Random) -> str:
    name = draw.choice(_THINGS)
    lines = [f"    {name}_{i} = load('{draw.choice(_PLACES)}', {draw.randint(1, 99)})" for i in range(6)]
    code = "\n".join(["def collect():", *lines, f"    return [{', '.join(f'{name}_{i}' for i in range(6))}]"])
    return f"Rename {name} to items in this code and repeat all of it:\n\n{code}\n"


def _rows(draw: random.Random, count: int) -> list[dict[str, object]]:
    return [
        {
            "id": draw.randint(100, 999),
            "name": draw.choice(_NAMES),
            "city": draw.choice(_PLACES),
            "count": draw.randint(1, 60),
        }
        for _ in range(count)
    ]


def _json(draw: random.Random) -> str:
    return f"Convert to JSON with the keys city and total, one object per line:\n{json.dumps(_rows(draw, 5))}"


def _table(draw: random.Random) -> str:
    return f"Write this JSON as a Markdown table:\n{json.dumps(_rows(draw, 6), indent=1)}"


def _repetition(draw: random.Random) -> str:
    words = " ".join(draw.choices(_THINGS, k=draw.randint(3, 6)))
    return f"Repeat this line eight times, exactly:\n{words} {draw.randint(10, 99)}"


def _copy(draw: random.Random) -> str:
    lines = (f"{draw.choice(_NAMES)} took {draw.randint(2, 40)} {draw.choice(_THINGS)} to {draw.choice(_PLACES)}."
             for _ in range(7))  # fmt: skip
    return "Copy this text, but write all city names in capitals:\n" + " ".join(lines)


def _language(draw: random.Random) -> str:
    return draw.choice(_SENTENCES)[1].format(draw.choice(_TOPICS))


def _translation(draw: random.Random) -> str:
    line = (
        f"{draw.choice(_NAMES)} carries {draw.randint(2, 40)} {draw.choice(_THINGS)} home from {draw.choice(_PLACES)}."
    )
    return f"Translate into {', '.join(name for name, _ in draw.sample(_SENTENCES, 3))}: {line}"


def _emoji(draw: random.Random) -> str:
    return f"Write a short story with these emoji, each used twice: {' '.join(draw.sample(_EMOJI, 4))}"


def _arithmetic(draw: random.Random) -> str:
    a, b, c = (draw.randint(11, 99) for _ in range(3))
    return f"Compute {a} * {b} + {c} step by step."


def _list(draw: random.Random) -> str:
    return f"List {draw.randint(8, 15)} facts about {draw.choice(_TOPICS)}, numbered, one line each."


def _long(draw: random.Random, count: int = 40) -> str:
    rows = (f"On day {i}, {draw.choice(_NAMES)} sent {draw.randint(2, 90)} {draw.choice(_THINGS)} to "
            f"{draw.choice(_PLACES)}." for i in range(1, count + 1))  # fmt: skip
    return f"{' '.join(rows)}\n\nQuote the lines about {draw.choice(_NAMES)} and {draw.choice(_PLACES)}."


KINDS: dict[str, Callable[[random.Random], str]] = {
    "question": _question,
    "code": _code,
    "edit": _edit,
    "json": _json,
    "table": _table,
    "repetition": _repetition,
    "copy": _copy,
    "language": _language,
    "translation": _translation,
    "emoji": _emoji,
    "arithmetic": _arithmetic,
    "list": _list,
    "long": _long,
}
"""Kind -> function that generates a prompt. Kinds take turns."""


def tasks(count: int, seed: int = 0) -> list[NamedPrompt]:
    """Return this many prompts. The first ones do not depend on the count."""
    made = []
    for i, (kind, make) in enumerate(islice(cycle(KINDS.items()), count)):
        draw, turn = random.Random(f"{seed} {i}"), i // len(KINDS)
        # Long prompts take turns at four lengths, from 600 to 8,000 tokens.
        text = _long(draw, (40, 80, 160, 540)[turn % 4]) if kind == "long" else make(draw)
        made.append(NamedPrompt(kind, f"{kind} {turn + 1}", text))
    return made


def contexts(count: int, seed: int = 0) -> list[NamedPrompt]:
    """Return short prompts with many possible replies. They repeat text, so that drafters propose tokens."""
    made = []
    for i in range(count):
        draw = random.Random(f"context {seed} {i}")
        words = draw.sample(_THINGS, 4)
        lines = " ".join(f"{draw.choice(_NAMES)} likes {draw.choice(words)}." for _ in range(8))
        made.append(NamedPrompt("context", f"context {i + 1}", f"Continue with one more sentence: {lines}"))
    return made


def answerable(count: int, seed: int = 0) -> list[tuple[NamedPrompt, str]]:
    """Return questions with checkable answers: `count` on arithmetic and `count` on extraction."""
    made = []
    for i in range(count):
        draw = random.Random(f"question {seed} {i}")
        a, b, c = draw.randint(2, 12), draw.randint(3, 20), draw.randint(2, 30)
        who, what = draw.choice(_NAMES), draw.choice(_THINGS)
        text = (
            f"{who} has {a} boxes with {b} {what} each, and finds {c} more. How many {what} does {who} have? "
            "Think in one sentence, then end with: Answer: NUMBER"
        )
        made.append((NamedPrompt("arithmetic", f"arithmetic {i + 1}", text), str(a * b + c)))
        rows = _rows(draw, 8)
        asked = draw.choice([row for row in rows if [r["id"] for r in rows].count(row["id"]) == 1])
        text = f"{json.dumps(rows)}\nIn which city is the person with id {asked['id']}? End with: Answer: CITY"
        made.append((NamedPrompt("extraction", f"extraction {i + 1}", text), str(asked["city"])))
    return made
