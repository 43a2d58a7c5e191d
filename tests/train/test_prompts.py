from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from paceline.checkpoints.loader import Loaded
from paceline.errors import InvalidData, InvalidOption, UnsupportedModel
from paceline.files.jsonl import Journal, JsonlFile
from paceline.llm import LLM
from paceline.text.tokenizer import Tokenizer
from paceline.train.answers import derive_seed
from paceline.train.prompts import Prompts, is_held
from paceline.train.self_prompts import SHORTEST, UserTurn, write_prompts
from paceline.train.writing import Progress
from tests.conftest import SHARED, packaged_model
from tests.support.toys import toy_llm, toy_target, toy_tokenizer
from tests.support.training_data import some_prompts, write_rows


def prompts_of(path: Path, data: bytes) -> Prompts:
    file = path / "p.jsonl"
    file.write_bytes(data)
    return Prompts(file)


def test_rows_of_every_form_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"prompt": "one"}, {"id": "t", "turns": ["two", "more"]}, {"id": 9, "messages": chat}]
    prompts = Prompts(write_rows(tmp_path / "p.jsonl", rows))
    assert [(p.id, p.prompt) for p in prompts] == [(1, "one"), ("t", "two"), (9, chat)]
    assert [prompts.find(name) for name in (1, "t", 9, "9", 2)] == [0, 1, 2, None, None]


def test_answers_that_somebody_recorded_after_the_user_are_left_out(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert Prompts(write_rows(tmp_path / "p.jsonl", [{"messages": chat}]))[0].prompt == chat[:1]
    with pytest.raises(InvalidData, match="line 1: all messages are the assistant's"):
        Prompts(write_rows(tmp_path / "p.jsonl", [{"messages": chat[1:]}]))


def test_marks_blank_lines_and_carriage_returns_change_nothing(tmp_path: Path) -> None:
    plain = prompts_of(tmp_path, b'{"prompt": "one"}\n{"prompt": "two"}')
    odd = prompts_of(tmp_path, b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n  \n{"prompt": "two"}\r\n\n')
    assert [p.prompt for p in odd] == ["one", "two"]
    assert [p.id for p in odd] == [1, 4], "an id that is missing is the line's number, blank lines counted"
    assert odd.digest != plain.digest


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": 7}', "'prompt' is not text"),
        (b'{"prompt": ""}', "'prompt' is empty"),
        (b'{"turns": []}', "'turns' is not a list of at least one text"),
        (b'{"messages": [{"role": "user"}]}', "message 1 is not an object"),
        (b'{"text": "a"}', "has no prompt"),
        (b'{"prompt": "a", "turns": ["b"]}', "only one of them"),
        (b'{"prompt": "a", "id": [1]}', "the id must be"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    with pytest.raises(InvalidData, match=f"p.jsonl, line 4: .*{said}.*Correct or remove the line"):
        prompts_of(tmp_path, b'{"prompt": "a"}\n\n{"prompt": "b"}\n' + line + b"\n")


def test_an_id_is_used_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="line 4: the id 7 is already used on line 1"):
        prompts_of(tmp_path, b'{"id": 7, "prompt": "a"}\n\n{"id": "7", "prompt": "b"}\n{"id": 7, "prompt": "c"}\n')


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="contains no prompts"):
        prompts_of(tmp_path, b"\n\n")


def test_the_order_is_a_shuffle_that_the_seed_decides(tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 60)
    assert sorted(prompts.order(3)) == list(range(60))
    assert list(prompts.order(3)) == list(prompts.order(3)) != list(prompts.order(4))


def test_the_held_out_part_depends_only_on_the_text(tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 600)
    assert 0 < prompts.held.sum() < 60
    assert [is_held(p.prompt) for p in prompts] == prompts.held.tolist()


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", ({"id": i, "prompt": f"{i} " + "x" * 4000} for i in range(1000)))
    tracemalloc.start()
    prompts = Prompts(path)
    assert prompts[999].id == 999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 500_000


def test_a_journal_loses_a_torn_line_only(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    for torn in (b"", b"{", b'{"n": 1', b"x" * 200_000):
        path.write_bytes(b'{"n": 0}\n' + torn)
        with Journal(path) as journal:
            journal.append({"n": "\u2028"})
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == [{"n": 0}, {"n": "\u2028"}]
    path.write_bytes(b"x" * 200_000)
    with Journal(path):
        assert path.read_bytes() == b""


def test_lines_know_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_bytes(b"\na\n\n\nb\nc\n\n")
    seen: list[tuple[bytes, int]] = []
    lines = JsonlFile(path, lambda line, number: seen.append((line, number)))
    assert seen == [(b"a\n", 2), (b"b\n", 5), (b"c\n", 6)]
    assert [lines[i] for i in range(len(lines))] == [line for line, _ in seen]


def test_no_prompt_to_train_on_is_a_question_of_the_benchmark(shared_prompts: Path) -> None:
    path = SHARED / "data" / "prompts" / "train_prompts.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there (it is not shipped)")
    asked = {turn for line in shared_prompts.open() for turn in json.loads(line)["turns"]}
    flat = {" ".join(turn.split()).casefold() for turn in asked}
    assert len(flat) > 200
    same = [p.id for p in Prompts(path) if isinstance(p.prompt, str) and " ".join(p.prompt.split()).casefold() in flat]
    assert same == []


# The model's own prompts.


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the toy's turns to 24 tokens."""
    monkeypatch.setattr("paceline.train.self_prompts.LONGEST", 24)
    monkeypatch.setattr("paceline.train.self_prompts.TRIES", 12)


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.open()]


def test_a_model_writes_prompts_of_its_own(short: None, tmp_path: Path) -> None:
    llm, path = toy_llm(), tmp_path / "own.jsonl"
    progress = write_prompts(llm, path, 6, width=4)
    rows = rows_of(path)
    assert (progress.written, progress.done, len(rows), len(Prompts(path))) == (6, 6, 6, 6)
    assert progress.skipped > 0, "a toy that always writes a whole turn tests no filter"
    assert all(len(row["prompt"]) >= 1 for row in rows)
    assert len({" ".join(row["prompt"].casefold().split()) for row in rows}) == 6
    turn = UserTurn.of(llm.tokenizer)
    assert list(turn.before) == llm.tokenizer.encode("<user:", special=False)
    begun = set()
    for row in rows:
        opening, ids = turn.begin(int(row["id"]), llm.tokenizer)
        one = llm.generate(ids, turn.sampling(derive_seed(0, int(row["id"]))))
        assert (opening + one.text).strip() == row["prompt"], "a prompt is what its own seed gives, alone as in a batch"
        assert len(one.token_ids) > SHORTEST
        begun.add(opening)
    assert "" in begun
    assert len(begun) > 1


def test_its_prompts_depend_on_the_seed_and_neither_on_width_nor_on_interruptions(short: None, tmp_path: Path) -> None:
    llm = toy_llm()
    whole, parts, other = (tmp_path / name / "own.jsonl" for name in ("whole", "parts", "other"))
    write_prompts(llm, whole, 6, width=4)
    write_prompts(llm, other, 1, width=1, seed=1)

    def stop(progress: Progress) -> None:
        if progress.written > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prompts(llm, parts, 6, width=1, on_progress=stop)
    kept = len(rows_of(parts))
    assert 0 < kept < 6
    last = int(rows_of(parts)[-1]["id"])
    with parts.open("ab") as file:
        file.write(b'{"id": 77, "pro')
    progress = write_prompts(llm, parts, kept + 1, width=3)
    new = int(rows_of(parts)[-1]["id"])
    assert (progress.kept, progress.written, progress.skipped) == (kept, 1, new - last - 1), "no text is made twice"
    assert write_prompts(llm, parts, 6, width=3).done == 6
    assert parts.read_bytes() == whole.read_bytes() != other.read_bytes()
    with pytest.raises(InvalidData, match="made with seed 0, not 1"):
        write_prompts(llm, parts, 6, seed=1)
    with pytest.raises(InvalidOption):
        write_prompts(llm, parts, 0)


def test_repeated_prompts_are_left_out(short: None, tmp_path: Path) -> None:
    llm, path = toy_llm(), tmp_path / "own.jsonl"
    write_prompts(llm, path, 1, width=4)
    (row,) = rows_of(path)
    path.write_text(json.dumps({"id": -1, "prompt": "\n " + row["prompt"].upper()}) + "\n")
    write_prompts(llm, path, 2, width=4)
    assert rows_of(path)[1]["id"] > row["id"]


def llm_with(template: str | None, alphabet_special: str = "") -> LLM:
    tokenizer = toy_tokenizer()
    if alphabet_special:
        tokenizer._backend.add_special_tokens([alphabet_special])
    tokenizer = Tokenizer(tokenizer._backend, tokenizer.special_tokens, template)
    return LLM(Loaded(toy_target(vocab_size=38), tokenizer, (36,), {}, Path("toy")))


def test_a_turn_ends_at_its_special_token_or_at_the_text_that_follows() -> None:
    chatml = "{% for m in messages %}<i{{ m.role }}\n{{ m.content | trim }}[END]\n{% endfor %}<ia\n"
    assert UserTurn.of(llm_with(chatml, "[END]").tokenizer).stop_token_ids == (37,)
    assert UserTurn.of(llm_with(chatml).tokenizer).stop == ("[END]\n<ia",)


@pytest.mark.parametrize(
    "template", [None, "always this", "{{ messages[0].content }}> end", "<u:{{ messages[0].content }}"]
)
def test_a_template_that_does_not_frame_the_user_is_no_source_of_prompts(template: str | None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--prompts FILE"):
        write_prompts(llm_with(template), tmp_path / "own.jsonl", 3)
    assert not (tmp_path / "own.jsonl").exists()


def test_a_model_that_never_ends_its_turn_is_given_up(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.self_prompts.OPENINGS", ("a",))
    llm = toy_llm(context_length=12)  # room for six tokens: no turn ends before it is cut
    mute = LLM(Loaded(llm.model.target, llm.tokenizer, (), {}, Path("toy")))
    with pytest.raises(UnsupportedModel, match="only 0 of the"):
        write_prompts(mute, tmp_path / "own.jsonl", 3, width=8)


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_asks_questions(short: None, tmp_path: Path) -> None:
    with packaged_model("demo") as model:
        llm = LLM(model)
        turn = UserTurn.of(llm.tokenizer)
        assert llm.tokenizer.decode(turn.before, skip_special=False).endswith("<|im_end|>\n<|im_start|>user\n")
        assert turn.stop_token_ids == (llm.tokenizer.eos_token_id,)
        write_prompts(llm, tmp_path / "own.jsonl", 2, width=2)
    assert all(len(row["prompt"].split()) > 2 for row in rows_of(tmp_path / "own.jsonl"))
