"""`paceline bench`: its arithmetic, and what a user sees. No timed assertion."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import paceline.llm
from paceline.bench import peers
from paceline.bench.figures import bootstrap, ratios, same_text, summarise
from paceline.bench.measure import Reply, Sample, measure
from paceline.bench.page import page
from paceline.bench.questions import Question, pick, read_questions
from paceline.bench.run import Order, run
from paceline.errors import InvalidData, InvalidOption
from paceline.stats import Stats
from tests.test_cli import failure
from tests.test_cli import run as command
from tests.toys import toy_llm


def questions_of(**sizes: int) -> list[Question]:
    return [Question(f"{name} {i}", name, f"{name} {i}") for name, size in sizes.items() for i in range(size)]


def test_pick_is_even_over_categories_and_always_the_same() -> None:
    questions = questions_of(writing=2, math=40, qa=40)
    chosen = pick(questions, 13)
    assert Counter(q.category for q in chosen) == {"writing": 2, "math": 6, "qa": 5}
    assert chosen == pick(questions, 13)
    assert [q.category for q in chosen[:3]] == ["writing", "math", "qa"]
    assert [q.text for q in pick(questions_of(math=40), 4)] == ["math 0", "math 10", "math 20", "math 30"]
    assert len(pick(questions, 1000)) == 82


def test_questions_of_both_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"id": 7, "category": "qa", "turns": ["two", "three"]}\n')
    assert read_questions(path) == [Question(1, "all", "one"), Question(7, "qa", "two")]
    path.write_text('{"prompt": "one"}\n{"turns": []}\n')
    with pytest.raises(InvalidData, match=r"q.jsonl, line 2: neither"):
        read_questions(path)
    path.write_text("\n")
    with pytest.raises(InvalidData, match="no prompts"):
        read_questions(path)


def sample(system: str, seconds: float, tokens: int = 10, question: str = "a", repeat: int = 0, first: float = 0.5):
    stats = Stats(0, "bits", rounds=5, tokens=tokens, drafted=8, accepted=5, accepted_at=[4, 1])
    stats.seconds |= {"draft": 0.01, "verify": 0.1}
    return Sample(system, Question(question, question, question), repeat, 0, seconds, Reply([1] * tokens, first, stats))


def test_figures_compare_within_a_question() -> None:
    samples = [
        *(sample("plain", 2.0), sample("fast", 1.0)),
        *(sample("plain", 8.0, question="b"), sample("fast", 2.0, question="b")),
        *(sample("plain", 2.0, repeat=1), sample("fast", 0.5, repeat=1)),
    ]
    assert ratios(samples, "fast", "plain") == [3.0, 4.0], "median of repeats first, then one per question"
    found = summarise(samples, "fast", "plain")
    assert found["ratio"]["median"] == 3.5
    assert found["tokens_per_second"] == pytest.approx(30 / 3.5)
    assert found["decode_tokens_per_second"] == pytest.approx(27 / 2.0)
    assert found["categories"]["b"] == {"tokens_per_second": 5.0, "ratio": 4.0, "tokens_per_round": 2.0}
    assert found["inside"]["accepted_at"] == [0.8, 0.2]
    assert found["inside"]["milliseconds"]["verify"] == pytest.approx(20.0)
    assert found["same_text"] == 1.0
    assert found["spread"] == pytest.approx(0.4714, abs=1e-3)
    assert same_text([*samples, sample("plain", 1, question="c"), sample("fast", 1, 9, "c")], "fast", "plain") == 0.75


def test_the_interval_holds_the_median_and_narrows() -> None:
    few, many = bootstrap([1.0, 2.0, 3.0]), bootstrap([1.0, 2.0, 3.0] * 30)
    assert few[0] <= 2 <= few[1]
    assert many[1] - many[0] < few[1] - few[0]


def test_every_system_is_warmed_up_and_the_order_rotates() -> None:
    asked: list[tuple[str, str]] = []
    systems = {name: lambda text, name=name: asked.append((name, text)) or Reply([1], 0.1) for name in "abc"}
    found = list(measure(systems, questions_of(x=2), repeats=2))
    assert asked[:3] == [("a", "x 0"), ("b", "x 0"), ("c", "x 0")]
    assert len(found) == 12
    assert [s.system for s in found[:6]] == ["a", "b", "c", "b", "c", "a"]
    assert Counter((s.system, s.repeat) for s in found) == dict.fromkeys([(n, r) for n in "abc" for r in (0, 1)], 2)


class Checker(HTMLParser):
    """Counts elements, and whatever reaches for another host."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.outside += [value for name, value in attrs if name in ("src", "href") and value]


def test_a_run_has_everything_and_its_page_needs_nothing() -> None:
    llm = toy_llm()
    seen: list[int] = []
    order = Order(("none", "suffix", "ngram"), tokens=12, repeats=2)
    result = run(llm, order, questions_of(ab=2, cd=1), lambda sample, total: seen.append(total))
    assert seen == [18] * 18
    assert [s["system"] for s in result["systems"]] == ["plain", "suffix", "ngram"]
    assert all(s["same_text"] == 1.0 for s in result["systems"])
    assert result["systems"][0]["inside"]["tokens_per_round"] == 1.0
    assert json.loads(json.dumps(result)) == result
    html = Checker(page(result))
    assert html.count["svg"] == 3
    assert html.count["tr"] == 4
    assert not html.outside


def test_a_peer_that_is_missing_is_named_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    result = run(toy_llm(), Order(("none",), against=("llama.cpp", "openvino"), tokens=4), questions_of(a=1))
    assert [s["system"] for s in result["systems"]] == ["plain"]
    assert result["missing"] == [
        "llama_cpp is not installed. pip install llama-cpp-python",
        "openvino_genai is not installed. pip install openvino-genai",
    ]
    with pytest.raises(InvalidOption, match="'vllm' is no program to compare with"):
        Order(against=("vllm",))


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paceline.llm, "load", lambda *_, **__: toy_llm())
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "x", "prompt": "abab"}\n{"category": "y", "prompt": "cd"}\n')
    return path


def test_the_command_shows_a_table_and_writes_files(prompts: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "bench.json", tmp_path / "bench.html"
    words = [
        "--drafters",
        "suffix",
        "--against",
        "openvino",
        "--tokens",
        "8",
        "--out",
        str(out),
        "--report",
        str(report),
    ]
    result = command("bench", "--prompts", str(prompts), *words)
    assert result.exit_code == 0, result.output
    assert "suffix" in result.stdout
    assert "worst category" in result.stdout
    assert json.loads(out.read_text())["provenance"]["settings"]["questions"] == 2
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--drafters", "magic"], "no drafter is called 'magic'"),
        (["--against", "vllm"], "no program to compare with"),
        (["--out", "/nowhere/x.json"], "/nowhere is no folder"),
        (["--draft", "many"], "--draft 'many'"),
    ],
)
def test_what_cannot_be_done_is_said_first(more: list[str], said: str, prompts: Path) -> None:
    assert said in failure(command("bench", "--prompts", str(prompts), *more))
