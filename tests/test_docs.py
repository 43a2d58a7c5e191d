"""Code in README and docs runs, and links have targets."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from paceline import Drafter
from paceline.checkpoints.loader import Loaded
from paceline.cli import app
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.session import Session
from paceline.testing import Oracle, ToyTarget, check_drafter, run, tiny_target
from paceline.types import DraftBudget
from tests.support.pages import DOCS, PAGES, ROOT, blocks, code_of
from tests.support.toys import toy_llm, toy_target, toy_tokenizer
from tests.support.vocabularies import byte_level, speaker


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.name != "cli.md":  # made from the commands
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def test_pages_and_sections_that_the_code_names_exist() -> None:
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py"), ROOT / "Makefile"]
    pattern = r"((?:docs|benchmarks/results)/[\w/.-]+\.md)(?:#([\w-]+))?"
    named = {found for source in sources for found in re.findall(pattern, source.read_text())}
    assert len(named) > 10
    for page, section in named:
        assert (ROOT / page).exists(), page
        assert not section or section in anchors(ROOT / page), f"{page}#{section}"


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in DOCS.rglob("*.md") if f": {page.relative_to(DOCS)}\n" not in site]


@pytest.mark.parametrize(
    "page", ["../README.md", "index.md", "tutorials/first-run.md", "how-to/batch.md"], ids=lambda page: Path(page).name
)
def test_first_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.load", lambda name, **options: toy_llm(Suffix() if options == {} else None))
    names: dict[str, Any] = {}
    for code in blocks(page):
        exec(compile(code, page, "exec"), names)


def test_python_code_is_python() -> None:
    codes = {name: code_of(page) for name, page in PAGES.items()}
    assert sum(map(len, codes.values())) > 20
    for name, blocks_of_page in codes.items():
        for code in blocks_of_page:
            compile(code, name, "exec")


def calls_of(line: str) -> list[list[str]]:
    """Return the arguments of each paceline call on a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;<>")
    lexer.whitespace_split = True
    calls: list[list[str]] = []
    call: list[str] | None = None
    for word in lexer:
        if word == "paceline":
            calls.append(call := [])
        elif set(word) <= set("|;<>"):
            call = None
        elif call is not None:
            call.append(word)
    return calls


def test_commands_exist_with_their_options() -> None:
    group: Any = typer.main.get_command(app)
    blocks = [block for page in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line for block in blocks if "docker run" not in block for line in block.replace("\\\n", " ").splitlines()]
    calls = [call for line in lines if re.search(r"\bpaceline ", line) for call in calls_of(line)]
    assert len(calls) > 30
    for command, *words in calls:
        known = {name for option in group.commands[command].params for name in option.opts}
        assert not [word for word in words if word.startswith("-") and word not in known], (command, words)


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Load: it.\n\nAll at once.\nmodel: a folder,\nor a file.\ndraft, n: how much.\n\nRaises `E`: why."
    listed = "- **model**: a folder,\n  or a file.\n- **draft, n**: how much."
    assert module.as_lists(text) == f"Load: it.\n\nAll at once.\n\n{listed}\n\nRaises `E`: why."


def test_the_drafter_of_own_drafter_md_works_and_fits_in_forty_lines() -> None:
    code, *_ = blocks("how-to/own-drafter.md")
    source = code[: code.index("llm = paceline.load")]
    lines = [line for line in source[source.index("class") :].splitlines() if line.strip()]
    assert len(lines) < 40
    names: dict[str, Any] = {}
    exec(compile(source, "own-drafter.md", "exec"), names)
    make = names["Bigram"]
    assert issubclass(make, Drafter)
    check_drafter(make)
    target = toy_target()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    for temperature in (0.0, 0.7):
        sampling = Sampling(max_new_tokens=40, temperature=temperature, seed=1)
        drafter = make()
        plain = run(target, prompt, sampling)[0]
        tokens, _, stats = run(target, prompt, sampling, drafter, DraftBudget.chain(4))
        assert tokens == plain
        assert stats.drafted > 0
    assert stats.accepted + run(target, prompt, Sampling(max_new_tokens=40), make())[2].accepted > 0


def test_the_loop_of_own_engine_md_decodes_what_greedy_decoding_does() -> None:
    (code,) = blocks("how-to/own-engine.md")
    names: dict[str, Any] = {}
    exec(compile(code, "own-engine.md", "exec"), names)
    likeliest = names["target"].argmax(-1).tolist()
    for text, length, prompt in zip(names["tokens"].tolist(), names["lengths"].tolist(), (3, 2), strict=True):
        assert length >= 20
        assert text[prompt : length + 1] == [likeliest[token] for token in text[prompt - 1 : length]]
    assert names["accepted"].tokens.shape == (2, 5)


def test_the_target_of_own_target_md_is_the_one_that_is_shipped_and_keeps_its_contract() -> None:
    target, use = blocks("how-to/own-target.md")
    assert target.strip() == inspect.getsource(ToyTarget).strip()
    exec(compile(use, "own-target.md", "exec"), {})


def test_the_loop_of_own_loop_md_writes_the_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm()
    monkeypatch.setattr("paceline.load", lambda name: llm)
    names: dict[str, Any] = {}
    exec(compile(blocks("how-to/own-loop.md")[0], "own-loop.md", "exec"), names)
    prompt = llm.encode("Why is the sky blue?")
    plain = llm.generate("Why is the sky blue?", Sampling(max_new_tokens=100 - len(prompt))).token_ids
    assert names["s"].history[len(prompt) :] == [token for token in plain if token != 36]


class Dice:
    """Replaces torch's random numbers, and enumerates every outcome with its probability."""

    def every(self, play: Callable[[], list[int]]) -> list[tuple[list[int], float]]:
        outcomes: list[tuple[list[int], float]] = []
        scripts: list[list[int]] = [[]]
        while scripts:
            self._script, self._thrown, self._chance = scripts.pop(), 0, 1.0
            self._others = scripts
            outcomes.append((play(), self._chance))
        return outcomes

    def throw(self, chances: list[float]) -> int:
        options = [i for i, chance in enumerate(chances) if chance > 0]
        if self._thrown == len(self._script):
            self._others += [[*self._script, other] for other in options[1:]]
            self._script.append(options[0])
        side = self._script[self._thrown]
        self._thrown += 1
        self._chance *= chances[side] / sum(chances)
        return side

    def multinomial(self, weights: Tensor, count: int) -> int:
        return self.throw(weights.tolist())

    def rand(self, shape: tuple[int, ...]) -> Uniform:
        return Uniform(self)


class Uniform:
    """u * q < p holds with probability min(1, p / q)."""

    def __init__(self, dice: Dice, scale: float = 1.0) -> None:
        self._dice, self._scale = dice, scale

    def __mul__(self, scale: Tensor) -> Uniform:
        return Uniform(self._dice, self._scale * float(scale))

    def __lt__(self, other: Tensor) -> bool:
        chance = min(1.0, float(other) / self._scale)
        return self._dice.throw([1 - chance, chance]) == 1


def small_session(seed: int, vocab: int) -> Session:
    target = tiny_target(seed, vocab_size=vocab, layers=1)
    return LLM(Loaded(target, toy_tokenizer(), (), {}, Path("toy"))).session()


def speculation(source: str, **names: Any) -> Callable[..., list[int]]:
    exec(compile(source, "own-loop.md", "exec"), names)
    if "dice" in names:
        names["torch"] = names["dice"]
    return names["speculate"]  # type: ignore[no-any-return]


def farthest(source: str, count: int, length: int) -> float:
    """Return the distance between the example's and the target's distribution of `count` tokens, over all outcomes."""
    dice, target, drafter, vocab, prompt = Dice(), small_session(0, 3), small_session(5, 3), 3, [1, 2, 0]
    speculate = speculation(source, dice=dice)

    def play() -> list[int]:
        target.reset()
        drafter.reset()
        return speculate(target, drafter, prompt, count, length, 8.0)

    ours = torch.zeros([vocab] * count, dtype=torch.float64)
    for tokens, chance in dice.every(play):
        ours[tuple(tokens[:count])] += chance
    target.reset()
    target.observe(prompt)
    plain = (target.next_logits() / 8.0).softmax(-1)
    if count == 2:
        plain = torch.stack([(target.logits_after([t])[1] / 8.0).softmax(-1) * plain[t] for t in range(vocab)])
    return float((ours - plain).abs().max())


def test_the_speculation_of_own_loop_md_has_the_targets_distribution_in_thirty_lines() -> None:
    source = blocks("how-to/own-loop.md")[1]
    body = source[source.index("def speculate") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30
    for count, length in ((1, 2), (2, 1)):
        assert farthest(source, count, length) < 1e-12
        no_residual = source.replace("(p[accepted] - q[accepted]).clamp(min=0)", "p[accepted]")
        assert farthest(no_residual, count, length) > 1e-3


def test_the_speculation_of_own_loop_md_writes_greedy_text_in_few_passes() -> None:
    llm = toy_llm()
    prompt = [1, 5, 9]
    plain = llm.generate(prompt, Sampling(max_new_tokens=30, ignore_eos=True)).token_ids
    speculate = speculation(blocks("how-to/own-loop.md")[1])
    for drafter in (toy_llm(), LLM(Loaded(tiny_target(9), toy_tokenizer(), (), {}, Path("toy")))):
        tokens = speculate(llm.session(), drafter.session(), prompt, 30, temperature=1e-7)
        assert tokens[:30] == plain


def test_the_processor_of_sampling_md_bends_the_text_and_not_its_equality() -> None:
    (code,) = (block for block in blocks("reference/sampling.md") if "def no_shouting" in block)
    target, names = toy_target(), {"CAPITALS": [3, 5, 9, 12]}
    exec(compile(code, "sampling.md", "exec"), names)
    sampling = Sampling(max_new_tokens=40, processors=[names["no_shouting"]])  # type: ignore[list-item]
    plain = run(target, [1, 2, 3], sampling)[0]
    assert plain != run(target, [1, 2, 3], Sampling(max_new_tokens=40))[0]
    assert run(target, [1, 2, 3], sampling, Oracle([1, 2, 3, *plain], 0.8, 37), DraftBudget(9, 3, 3))[0] == plain


def test_the_schema_of_structured_output_md_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("paceline.load", lambda name: LLM(speaker(byte_level(), seed=3)))
    names: dict[str, Any] = {}
    exec(compile(blocks("how-to/structured-output.md")[0], "structured-output.md", "exec"), names)
    said = json.loads(names["reply"].text)
    assert list(said) == names["animal"]["required"]
    assert said["natural_habitat"] in ("land", "water", "air")
    assert names["reply"].stats.rounds < len(names["reply"].token_ids) / 2
