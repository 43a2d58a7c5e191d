"""`paceline bench`: its arithmetic, other programs in their processes, and its output. Assertions are never timed."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline.llm
from paceline.bench import peer_process as peer_module
from paceline.bench import peers
from paceline.bench.figures import bootstrap, decode_speed, median, ratios, same_text, summarise
from paceline.bench.measure import WARM_UP, MeasuredReply, Sample, SystemFailed, measure
from paceline.bench.page import page
from paceline.bench.peer_process import PeerProcess
from paceline.bench.peers import PeerPrompt, PeerSetup, PeerUnavailable
from paceline.bench.plots import Series, dot_plot, require_matplotlib
from paceline.bench.provenance import provenance
from paceline.bench.questions import Question, batches, lengthen, pick, read_questions
from paceline.bench.run import run
from paceline.bench.systems import Comparison, System, own_systems, peer_systems, render, split_budget
from paceline.bench.tables import Grid, all_grids, main_grids
from paceline.engine.stats import Stats
from paceline.errors import InvalidData, InvalidOption
from paceline.llm import LLM
from paceline.types import DraftBudget
from paceline.vision.picture import read_picture
from paceline.vision.prompt import ImagePrompt
from tests.support.pictures import encoded, noise
from tests.support.toy_cli import failure
from tests.support.toy_cli import run as command
from tests.support.toy_vision import seeing_llm
from tests.support.toys import toy_llm, toy_tokenizer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.measure.PAUSE", 0.0)


def questions_of(**sizes: int) -> list[Question]:
    return [Question(f"{name} {i}", name, f"{name} {i}") for name, size in sizes.items() for i in range(size)]


def test_pick_is_even_over_categories_and_always_the_same() -> None:
    questions = questions_of(writing=2, math=40, qa=40)
    chosen = pick(questions, 13)
    assert Counter(q.category for q in chosen) == {"writing": 2, "math": 6, "qa": 5}
    assert chosen == pick(questions, 13)
    assert [q.category for q in chosen[:3]] == ["writing", "math", "qa"]
    assert [q.text for q in pick(questions_of(math=40), 4)] == ["math 0", "math 10", "math 20", "math 30"]


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_pick_gives_what_there_is(count: int) -> None:
    assert len({q.id for q in pick(questions_of(a=3, b=4), count)}) == min(count, 7)


def test_questions_of_both_forms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"id": 7, "category": "qa", "turns": ["two", "three"]}\n')
    assert read_questions(path) == [Question(1, "all", "one"), Question(7, "qa", "two")]
    for bad in ('{"turns": []}', '{"messages": [{"role": "user", "content": "x"}]}', '{"prompt": "x", "category": 3}'):
        path.write_text(f'{{"prompt": "one"}}\n{bad}\n')
        with pytest.raises(InvalidData, match=r"q.jsonl, line 2: "):
            read_questions(path)
    path.write_text("\n")
    with pytest.raises(InvalidData, match="no prompts"):
        read_questions(path)


def test_a_question_is_lengthened_by_the_text_of_others() -> None:
    asked, *others = (Question(i, "all", letter * 8) for i, letter in enumerate("abc"))
    longer = lengthen(asked, [asked, *others], 20, toy_tokenizer())
    assert longer.text == "bbbbbbbb\n\ncc\n\naaaaaaaa"
    assert (longer.id, longer.category) == (0, "all")
    assert lengthen(asked, others, 8, toy_tokenizer()) == asked
    with pytest.raises(InvalidOption, match="18 tokens in total, but question 0 needs 92"):
        lengthen(asked, others, 100, toy_tokenizer())


def test_batches_hold_one_category_where_it_has_enough() -> None:
    joined = batches([*questions_of(math=3), *questions_of(qa=2), *questions_of(math=1)], 2)
    assert [(q.category, q.texts) for q in joined] == [
        ("math", ["math 0", "math 1"]),
        ("math", ["math 2", "math 0"]),
        ("qa", ["qa 0", "qa 1"]),
    ]
    assert [q.category for q in batches(questions_of(math=3, qa=2), 2)] == ["math", "mixed", "qa"]


def test_batches_are_measured_at_every_width() -> None:
    comparison = Comparison(("suffix",), tokens=8, widths=(1, 3))
    found = run({"": toy_llm()}, comparison, questions_of(ab=5))
    systems = {s["system"]: s for s in found["systems"]}
    assert list(systems) == ["plain", "plain batch 3", "suffix", "suffix batch 3"]
    assert {s["tokens"] for s in systems.values()} == {40}
    assert all(s["same_text"] == 1.0 for s in systems.values())
    assert systems["plain"]["categories"]["ab"]["questions"] == 5
    assert [len(s["stats"]) for s in found["samples"]] == [3] * 4 + [2] * 4
    assert [line.partition(":")[0] for line in found["findings"]] == ["plain batch 3", "suffix batch 3"]
    assert found["findings"][0].endswith("the throughput of plain")
    assert main_grids(found)[0].title == "Text to text, in batches"


def test_plots_are_deterministic_and_name_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    series = [Series("a & b", 0), Series("c", 11, hollow=True)]
    drawn = dot_plot({"<x>": [1.0, 2.0]}, series, "speed", "tok/s")
    assert drawn == dot_plot({"<x>": [1.0, 2.0]}, series, "speed", "tok/s")
    assert drawn.startswith("<svg ")
    assert "<title>a &amp; b, &lt;x&gt;: 1.0 tok/s</title>" in drawn
    assert ' id="tip' not in drawn
    monkeypatch.setattr("paceline.bench.plots.find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"needs matplotlib.* pip install .*\[bench\]"):
        require_matplotlib()


def sample(system: str, seconds: float, tokens: int = 10, question: str = "a", repeat: int = 0, first: float = 0.5):
    stats = Stats(0, "bits", rounds=5, tokens=tokens, drafted=8, accepted=5, accepted_at=[4, 1])
    stats.seconds |= {"draft": 0.01, "verify": 0.1}
    return Sample(
        system, Question(question, question, question), repeat, 0, seconds, MeasuredReply([1] * tokens, first, (stats,))
    )


def test_figures_compare_within_a_question() -> None:
    samples = [
        *(sample("plain", 2.0), sample("fast", 1.0)),
        *(sample("plain", 8.0, question="b"), sample("fast", 2.0, question="b")),
        *(sample("plain", 2.0, repeat=1), sample("fast", 0.5, repeat=1, first=0.3)),
        *(sample("other", 1.0), sample("other", 1.0, question="b"), sample("other", 1.0, repeat=1)),
    ]
    assert ratios(samples, "fast", "plain") == [3.0, 4.0], "median of repeats first, then one per question"
    found = summarise(samples, "fast", "plain", ["other"])
    assert found["ratios"]["plain"] == {"median": 3.5, "low": 3.0, "high": 4.0}
    assert found["ratios"]["other"]["median"] == 1.0, "1.5 and 0.5"
    assert found["decode_ratio"]["median"] == pytest.approx((5.25 + 5.0) / 2)
    assert found["tokens_per_second"] == pytest.approx(30 / 3.5)
    assert found["decode_tokens_per_second"] == pytest.approx(27 / 2.2)
    assert found["categories"]["b"] == {
        "questions": 1,
        "tokens_per_second": 5.0,
        "ratio": 4.0,
        "tokens_per_round": 2.0,
    }
    assert found["inside"]["accepted_at"] == [0.8, 0.2]
    assert found["inside"]["milliseconds"]["verify"] == pytest.approx(20.0)
    assert found["inside"]["drafted_per_round"] == 1.6
    assert found["same_text"] == 1.0
    assert found["spread"] == pytest.approx(0.4714, abs=1e-3)
    assert same_text([*samples, sample("plain", 1, question="c"), sample("fast", 1, 9, "c")], "fast", "plain") == 0.75


def test_a_reply_of_one_token_has_no_decode_speed_to_compare() -> None:
    samples = [sample("plain", 1.0, 1), sample("fast", 1.0, 1)]
    assert summarise(samples, "fast", "plain", [])["decode_ratio"] is None
    assert decode_speed(samples) == 0.0


def test_the_interval_holds_the_median_and_narrows() -> None:
    values = [1.0, 1.2, 1.4, 1.5, 1.9, 2.0, 2.2, 3.0]
    few, many = bootstrap(values), bootstrap(values * 30)
    assert min(values) <= few[0] < median(values) < few[1] <= max(values)
    assert many[1] - many[0] < few[1] - few[0]
    assert few == bootstrap(values)
    assert bootstrap([2.5]) == (2.5, 2.5)
    assert all(math.isnan(x) for x in bootstrap([]))


def test_every_system_is_warmed_up_and_the_order_rotates() -> None:
    asked: list[str] = []
    systems = {
        name: lambda question, name=name: asked.append(name + question.text) or MeasuredReply([1], 0.1)
        for name in "abc"
    }
    found = list(measure(systems, questions_of(x=3), repeats=2))
    assert asked[:4] == [f"a{WARM_UP}", f"b{WARM_UP}", f"c{WARM_UP}", "ax 0"], "no question is asked before its time"
    samples = [s for s in found if isinstance(s, Sample)]
    assert ["".join(s.system for s in samples[i : i + 3]) for i in range(0, 18, 3)] == ["abc", "bca", "cab"] * 2
    assert {(s.system, s.order) for s in samples} == {(name, i) for name in "abc" for i in range(3)}
    assert Counter((s.system, s.repeat) for s in samples) == dict.fromkeys([(n, r) for n in "abc" for r in (0, 1)], 3)


def test_a_failed_system_gets_no_more_questions() -> None:
    asked: list[str] = []

    def failing(question: Question) -> MeasuredReply:
        asked.append(question.text)
        if question.text == "x 1":
            raise SystemFailed("gone")
        return MeasuredReply([1], 0.1)

    found = list(measure({"a": failing, "b": lambda question: MeasuredReply([1], 0.1)}, questions_of(x=4)))
    assert asked == [WARM_UP, "x 0", "x 1"]
    assert [(name, str(error)) for name, error in (e for e in found if isinstance(e, tuple))] == [("a", "gone")]
    assert Counter(s.system for s in found if isinstance(s, Sample)) == {"a": 1, "b": 4}


@pytest.mark.parametrize(
    ("drafter", "found"),
    [
        ("eagle3", ("eagle3", None)),
        ("eagle3@3", ("eagle3", DraftBudget.chain(3))),
        ("suffix@24x6x4", ("suffix", DraftBudget(24, 6, 4))),
        ("model:base@adapter", ("model:base@adapter", None)),
        ("model:base@adapter@5", ("model:base@adapter", DraftBudget.chain(5))),
    ],
)
def test_a_drafter_can_have_its_own_draft_size(drafter: str, found: tuple[str, DraftBudget | None]) -> None:
    assert split_budget(drafter) == found


def test_a_system_is_named_by_all_that_it_is() -> None:
    assert System().name == "plain"
    drafting = System("paceline", "eagle3@3", "int4", 0.7)
    assert drafting.name == "eagle3@3 int4 T=0.7"
    assert drafting.base.name == "plain int4 T=0.7"
    assert System("openvino", "lookup").base.name == "openvino"


@pytest.mark.parametrize(("precision", "quantize"), [("", "auto"), ("int4", "auto"), ("int4+int8", "int8")])
def test_drafters_have_a_precision_of_their_own(precision: str, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "paceline.bench.systems.open_drafter", lambda spec, target, mode, **_: asked.append((spec, mode))
    )
    own_systems({precision: toy_llm()}, Comparison(("suffix@3",)))
    assert asked == [("none", quantize), ("suffix", quantize)]


def test_a_rule_is_for_what_is_sampled() -> None:
    assert [Comparison(rule="block").sampling(heat).rule for heat in (0.0, 0.7)] == ["match", "block"]


def test_a_peer_gets_the_rendered_prompt_and_rendering_time_counts() -> None:
    asked: list[PeerPrompt] = []
    child: Any = SimpleNamespace(ask=lambda ask: asked.append(ask) or MeasuredReply([1], 0.25))
    found = peer_systems("x", child, toy_llm(), Comparison(temperatures=(0.0, 0.7), seed=4))
    replies = {system.name: write(Question(1, "qa", "why")) for system, write in found.items()}
    assert list(replies) == ["x", "x lookup", "x T=0.7", "x lookup T=0.7"]
    assert asked == [PeerPrompt("<user:why><a:", heat, drafter, 4) for heat in (0.0, 0.7) for drafter in ("", "lookup")]
    assert all(reply.first > 0.25 for reply in replies.values())


JOB = PeerSetup("toy", (36, 5), 8, 40, 2)


@pytest.fixture
def child() -> Iterator[PeerProcess]:
    child = PeerProcess("tests.support.fake_peers:counting", JOB)
    yield child
    child.close()


def test_a_peer_answers_from_a_process_of_its_own(child: PeerProcess) -> None:
    assert child.ask(PeerPrompt("abc", 0.7, "lookup", 4)) == MeasuredReply([8, 40, 2, 36, 5, 3, 1, 7, 4], 0.25)
    assert child.ask(PeerPrompt("é\n")).token_ids[5:] == [2, 0, 0, 0]


def test_a_peer_does_not_inherit_the_spin_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = peer_module._environment()
    assert "GOMP_SPINCOUNT" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_a_peer_that_cannot_begin_says_why() -> None:
    with pytest.raises(PeerUnavailable, match=r"^absent is not installed. pip install absent$"):
        PeerProcess("tests.support.fake_peers:absent", JOB)
    with pytest.raises(PeerUnavailable, match=r"it could not start \(RuntimeError: no such instruction\)"):
        PeerProcess("tests.support.fake_peers:broken", JOB)


class Page(HTMLParser):
    """Parser that collects the elements of a page, and its references to other hosts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[f"{tag}.{dict(attrs).get('class')}" if tag == "svg" else tag] += 1
        self.outside += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Return a result with two precisions, two temperatures, three drafters in four sizes, and two other programs."""
    kinds = {"good": "without_lookup", "bad": "broken", "dead": "dying"}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in kinds.items():
            patch.setitem(peers.PEERS, name, f"tests.support.fake_peers:{kind}")
        patch.setattr("paceline.bench.measure.PAUSE", 0.0)
        order = Comparison(("none", "suffix", "ngram@2"), tuple(kinds), (0.0, 0.7), tokens=12, repeats=2, seed=3)
        targets = {"": toy_llm(), "int8": toy_llm(seed=5)}
        seen: list[int] = []
        found = run(targets, order, questions_of(ab=2, cd=1), lambda sample, total: seen.append(total))
    assert len(seen) == len(found["samples"])
    return found


@pytest.mark.slow
def test_a_run_measures_every_drafter_at_every_precision_and_temperature(result: dict[str, Any]) -> None:
    drafters, precisions, heats = ("plain", "suffix", "ngram@2"), ("", " int8"), ("", " T=0.7")
    own = {f"{d}{p}{t}" for d in drafters for p in precisions for t in heats}
    assert {s["system"] for s in result["systems"]} == own | {"good", "good T=0.7"}
    assert result["systems"][0]["system"] == "plain"
    assert json.loads(json.dumps(result)) == result
    assert Counter(s["system"] for s in result["samples"]) == dict.fromkeys(own | {"good", "good T=0.7"}, 6)


@pytest.mark.slow
def test_a_run_is_lossless_at_every_precision_and_temperature(result: dict[str, Any]) -> None:
    by_name = {s["system"]: s for s in result["systems"]}
    assert all(s["same_text"] == 1.0 for s in result["systems"])
    assert by_name["ngram@2 int8 T=0.7"]["base"] == "plain int8 T=0.7"
    assert by_name["plain"]["inside"]["tokens_per_round"] == 1.0
    assert by_name["ngram@2"]["inside"]["drafted_per_round"] <= 2
    assert set(by_name["suffix int8 T=0.7"]["ratios"]) == {"plain int8 T=0.7", "good T=0.7"}
    assert result["provenance"]["settings"]["temperatures"] == [0.0, 0.7]


@pytest.mark.slow
def test_a_peer_that_fails_is_named_and_the_others_go_on(result: dict[str, Any]) -> None:
    said = dict(line.split(": ", 1) for line in result["missing"])
    assert said["bad"] == "it could not start (RuntimeError: no such instruction)"
    assert said["good lookup"] == "ValueError: prompt lookup is greedy only"
    assert said["dead T=0.7"] == "its process ended unexpectedly (out of luck)"
    assert set(said) == {
        "bad",
        "good lookup",
        "good lookup T=0.7",
        *(f"dead{x}" for x in ("", " lookup", " T=0.7")),
    } | {"dead lookup T=0.7"}


@pytest.mark.slow
def test_the_findings_compare_with_the_best_other_and_with_greedy(result: dict[str, Any]) -> None:
    best = [line for line in result["findings"] if line.startswith("the fastest system of Paceline, ")]
    assert [line.rpartition(", ")[2] for line in best] == ["good", "good T=0.7"]
    warm = [line.partition(":")[0] for line in result["findings"] if line.endswith("of the greedy speed-up")]
    assert warm == [f"{d}{p} T=0.7" for p in ("", " int8") for d in ("suffix", "ngram@2")]


@pytest.mark.slow
def test_a_page_is_self_contained_and_shows_every_system(result: dict[str, Any]) -> None:
    html = Page(page(result))
    assert html.count["svg.plot"] == 5, "two at each temperature, and where the time goes"
    assert not html.open
    assert not html.outside
    assert html.count["table"] == len(all_grids(result))
    words = " ".join(html.words)
    assert "tokens per second, end to end" in words
    assert "depth, in draft tokens" in words
    assert "milliseconds per round" in words
    assert all(words.count(s["system"]) > 2 for s in result["systems"])
    assert "not measured: bad: it could not start" in words


def test_a_page_without_drafters_has_no_plot_of_drafts() -> None:
    found = run({"": toy_llm()}, Comparison(("none",), tokens=4), questions_of(a=1))
    assert Page(page(found)).count["svg.plot"] == 2
    assert [grid.title for grid in main_grids(found)] == ["Text to text, one at a time"]
    assert found["findings"] == found["missing"] == []


def test_names_are_shown_as_they_are() -> None:
    grid = Grid("a & b", ["<x>", "y"], [["<i>", "1"]])
    assert "<th scope=row>&lt;i&gt;</th><td>1</td>" in grid.html()
    assert "| <i> | 1 |" in grid.markdown()


def test_impossible_comparisons_are_refused_at_once() -> None:
    with pytest.raises(InvalidOption, match="'vllm' is not a known program"):
        Comparison(against=("vllm",))
    with pytest.raises(InvalidOption, match="no drafter is called 'magic'"):
        Comparison(("magic@3",))
    with pytest.raises(InvalidOption, match="temperature"):
        Comparison(temperatures=(-1.0,))


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "transformers"])
def test_a_peer_that_is_not_installed_names_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    module, _, begin = peers.PEERS[name].partition(":")
    with pytest.raises(PeerUnavailable, match=r"is not installed. pip install "):
        getattr(import_module(module), begin)(JOB)


def test_a_question_is_rendered_as_a_users_message() -> None:
    assert render(toy_llm(), "why") == "<user:why><a:"


def test_provenance_names_what_a_number_needs() -> None:
    source = provenance(tokens=96)
    assert source.keys() == {"command", "date", "commit", "dirty", "versions", "machine", "settings"}
    assert {"python", "paceline", "torch", "transformers", "openvino-genai"} <= source["versions"].keys()
    assert {"cpu", "cores", "threads", "load"} <= source["machine"].keys()
    assert source["settings"] == {"tokens": 96}


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "x", "prompt": "abab"}\n{"category": "y", "prompt": "cd"}\n')
    return path


def test_the_command_shows_a_table_and_writes_files(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(paceline.llm, "load", lambda model, **options: loaded.append(options) or toy_llm())
    monkeypatch.setitem(peers.PEERS, "openvino", "tests.support.fake_peers:absent")
    out, report, notes = (tmp_path / f"bench.{kind}" for kind in ("json", "html", "md"))
    words = "--drafters ngram@1 --against openvino --tokens 4 --temperature 0,0.5 --context 4"
    words += " --quantize none,int4+int8,int4"
    files = ["--out", str(out), "--report", str(report), "--report", str(notes)]
    result = command("bench", "--prompts", str(prompts), *words.split(), *files)
    assert result.exit_code == 0, result.output
    assert {options["quantize"] for options in loaded} == {"none", "int4"}
    assert len(loaded) == 2, "one target for both drafters' precisions"
    assert "ngram@1 int4+int8 T=0.5" in result.stdout
    assert "not measured: openvino: absent is not installed" in result.stderr
    settings = json.loads(out.read_text())["provenance"]["settings"]
    assert (settings["questions"], settings["context"], settings["prompts"]) == (2, 4, str(prompts))
    assert report.read_text().startswith("<!doctype html>")
    assert notes.read_text().startswith("# bench, ")
    assert "| ngram@1 int4 T=0.5 |" in notes.read_text()


def test_images_come_before_every_prompt_and_are_named_in_the_result(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, image, out = seeing_llm(), tmp_path / "a.png", tmp_path / "b.json"
    image.write_bytes(encoded(noise()))
    asked: list[list[int]] = []
    start = LLM.start
    monkeypatch.setattr(
        LLM, "start", lambda self, ids, *rest, **more: asked.append(ids) or start(self, ids, *rest, **more)
    )
    monkeypatch.setattr(paceline.llm, "load", lambda *_, **__: llm)
    words = ["--prompts", str(prompts), "--tokens", "4", "--image", str(image), "--out", str(out)]
    for batch in ("1", "2"):
        assert command("bench", *words, "--batch", batch).exit_code == 0
    assert [len(ids.images) for ids in asked if isinstance(ids, ImagePrompt)] == [1] * len(asked)
    assert llm.vision
    assert llm.vision.sizes == [(24, 16)], "it is encoded once"  # type: ignore[attr-defined]
    [named] = json.loads(out.read_text())["provenance"]["settings"]["images"]
    assert named == {"file": str(image), "pixels": [24, 16], "sha256": read_picture(image).digest}
    monkeypatch.setattr(paceline.llm, "load", lambda *_, **__: toy_llm())
    assert "reads text only" in failure(command("bench", *words))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--image", "none.png"], "cannot read the image none.png"),
        (["--image", "none.png", "--against", "openvino"], "other programs are only measured without images"),
        (["--drafters", "magic"], "no drafter is called 'magic'"),
        (["--against", "vllm"], "not a known program"),
        (["--out", "/nowhere/x.json"], "/nowhere is not a folder"),
        (["--report", "x.pdf"], "must end in .md or .html, got x.pdf"),
        (["--batch", "many"], "--batch must be whole numbers"),
        (["--batch", "0"], "1 request or more, got 0"),
        (["--batch", "2", "--against", "openvino"], "one request at a time"),
        (["--temperature", "warm"], "--temperature must be numbers separated by commas, got 'warm'"),
        (["--rule", "mine"], "mine"),
        (["--quantize", "int4+int3"], "int3"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(
    more: list[str], said: str, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.llm, "load", lambda *_, **__: pytest.fail("loaded"))
    assert said in failure(command("bench", "--prompts", str(prompts), *more))
