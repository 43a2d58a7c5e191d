"""What the documents show is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.protocols import Drafter
from paceline.sampling import Sampling
from paceline.testing import run, tiny_target
from paceline.types import Tree

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_drafter_of_extend_md_works_and_fits_in_forty_lines() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "extend.md").read_text(), re.DOTALL)
    source = code[: code.index("llm = paceline.load")]
    lines = [line for line in source[source.index("class") :].splitlines() if line.strip()]
    assert len(lines) < 40
    names: dict[str, object] = {}
    exec(compile(source, "extend.md", "exec"), names)
    make = names["Bigram"]
    assert isinstance(make, type)
    assert issubclass(make, Drafter)
    target = tiny_target()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    for temperature in (0.0, 0.7):
        sampling = Sampling(max_new_tokens=40, temperature=temperature, seed=1)
        drafter = make()
        plain = run(target, prompt, sampling)[0]
        tokens, _, stats = run(target, prompt, sampling, drafter, Tree.chain(4))
        assert tokens == plain
        assert stats.drafted > 0
    assert stats.accepted + run(target, prompt, Sampling(max_new_tokens=40), make())[2].accepted > 0


def test_the_loop_of_functional_md_decodes_what_greedy_decoding_does() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "functional.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "functional.md", "exec"), names)
    likeliest = names["target"].argmax(-1).tolist()
    for text, length, prompt in zip(names["tokens"].tolist(), names["lengths"].tolist(), (3, 2), strict=True):
        assert length >= 20
        assert text[prompt : length + 1] == [likeliest[token] for token in text[prompt - 1 : length]]
    assert names["accepted"].tokens.shape == (2, 5)
