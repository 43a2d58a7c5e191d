"""What the documents show is run."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.protocols import Drafter
from paceline.sampling import Sampling
from paceline.testing import Oracle, run, tiny_target
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


def test_the_processor_of_sampling_md_bends_the_text_and_not_its_equality() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "sampling.md").read_text(), re.DOTALL)
    target, names = tiny_target(), {"CAPITALS": [3, 5, 9, 12]}
    exec(compile(code, "sampling.md", "exec"), names)
    sampling = Sampling(max_new_tokens=40, processors=[names["no_shouting"]])  # type: ignore[list-item]
    plain = run(target, [1, 2, 3], sampling)[0]
    assert plain != run(target, [1, 2, 3], Sampling(max_new_tokens=40))[0]
    assert run(target, [1, 2, 3], sampling, Oracle([1, 2, 3, *plain], 0.8, 37), Tree(9, 3, 3))[0] == plain
