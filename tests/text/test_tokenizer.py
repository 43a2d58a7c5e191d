"""Tokenizers from folders and from GGUF metadata, and chat templates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.checkpoints.gguf_file import read_gguf
from paceline.errors import CorruptModel, InvalidOption, InvalidPrompt, PacelineError, UnsupportedModel
from paceline.files.locate import resolve
from paceline.text.gguf_splitters import SPLITTERS
from paceline.text.tokenizer import Tokenizer
from tests.support import golden_tokens, vocabularies
from tests.support.awkward_texts import AWKWARD


@pytest.fixture(scope="module")
def demo_path() -> Path:
    try:
        return resolve("demo", quiet=True)
    except PacelineError as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(demo_path).fields)


@pytest.mark.slow
@pytest.mark.model
def test_the_golden_tokens_are_transformers_own(demo_path: Path) -> None:
    """If they differ, write them again: `python -m tests.support.golden_tokens`."""
    pytest.importorskip("transformers")
    assert golden_tokens.made(demo_path) == golden_tokens.tokens()


@pytest.mark.model
def test_demo_equals_transformers(demo: Tokenizer) -> None:
    golden = golden_tokens.tokens()
    assert golden_tokens.digest(demo.vocabulary) == golden["vocabulary"]
    assert sorted(demo.special_ids) == golden["special"]
    for text, ids, shown in zip(AWKWARD, golden["ids"], golden["texts"], strict=True):
        assert demo.encode(text) == ids, text
        assert demo.decode(ids) == shown
    assert demo.apply_chat_template(golden_tokens.CHAT) == golden["chat"]


@pytest.mark.model
def test_demo_facts(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_id) == (49152, 1, 2)
    assert demo.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert demo.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert demo.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert demo.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert demo.apply_chat_template([{"role": "user", "content": "Hi"}]).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
@pytest.mark.parametrize("text", AWKWARD)
def test_demo_round_trip(demo: Tokenizer, text: str) -> None:
    assert demo.decode(demo.encode(text), skip_special=False) == text


def byte_level(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE: all bytes, two merges, three added tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "12", "<s>", "</s>", "<mark>"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": ["a b", "1 2"],
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the pieces of a text before merging, in plain characters."""
    names = {number: token for token, number in tokenizer.vocabulary.items()}
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert names
    return [decoders.ByteLevel().decode([piece]) for piece, _ in cut]


@pytest.mark.parametrize("pre", sorted(pre for pre, splitter in SPLITTERS.items() if not splitter.nfc))
def test_every_splitter_keeps_the_text(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre, add_bos_token=False))
    for text in AWKWARD:
        assert "".join(pieces(tokenizer, text)) == text
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("glm4", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("stablelm2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("dbrx", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("gpt-4o", ["I'll", " pay", " ", "123", "45", "€", "  ", " NOW'VE", "\n\n"]),
        ("kimi-k2", ["I'll", " pay", " ", "123", "45", "€", "  ", " NOW'VE", "\n\n"]),
        ("seed-coder", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("deepseek-v3", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        (
            "deepseek-llm",
            ["I", "'", "ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'", "VE", "\n", "\n"],
        ),
        ("command-r", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("falcon", ["I", "'", "ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("lfm2", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("falcon-h1", ["I", "'ll", " pay", " ", "123", "45", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("exaone4", ["I", "'ll", " pay", " 12345", "€", "  ", " NOW", "'", "VE", "\n\n"]),
        ("qwen35", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW", "'VE", "\n\n"]),
        ("tiny_aya", ["I'll", " pay", " ", "12", "345", "€", "  ", " NOW'VE", "\n\n"]),
        ("youtu", ["I'll", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " NOW'VE", "\n\n"]),
    ],
)
def test_splitters(pre: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre))
    assert pieces(tokenizer, "I'll pay 12345€   NOW'VE\n\n") == expected


def test_qwen35_keeps_marks_in_words() -> None:
    text = "x\u0301y हिन्दी"
    assert pieces(Tokenizer.from_gguf(byte_level(pre="qwen35")), text) == ["x\u0301y", " हिन्दी"]
    assert len(pieces(Tokenizer.from_gguf(byte_level(pre="qwen2")), text)) > 2


def test_kimi_cuts_between_scripts() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="kimi-k2"))
    assert pieces(tokenizer, "camelCase你好abc 你好\n") == ["camel", "Case", "你好", "abc", " ", "你好", "\n"]


def test_tekken_cuts_at_case() -> None:
    assert pieces(Tokenizer.from_gguf(byte_level(pre="tekken")), "camelCaseHTTPServer") == [
        "camel",
        "Case",
        "HTTPServer",
    ]


def test_bos_and_eos() -> None:
    def ends(**fields: Any) -> list[int]:
        return Tokenizer.from_gguf(byte_level(**fields)).encode("")

    bos, eos = byte_level()["tokenizer.ggml.bos_token_id"], byte_level()["tokenizer.ggml.eos_token_id"]
    assert ends() == []
    assert ends(add_bos_token=True, add_eos_token=True) == [bos, eos]
    assert ends(add_eos_token=True) == [eos]
    assert ends(pre="llama-bpe") == [bos]
    assert ends(pre="llama-bpe", add_bos_token=False) == []
    assert ends(pre="llama-bpe", bos_token_id=None) == []
    assert Tokenizer.from_gguf(byte_level(add_bos_token=True)).encode("a", special=False) != [bos]


def test_added_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = tokenizer.encode("ab<mark>ab</s>")
    assert tokenizer.decode(ids) == "ab<mark>ab"
    assert tokenizer.decode(ids, skip_special=False) == "ab<mark>ab</s>"
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"pre": "brand-new"}, UnsupportedModel, "'brand-new'"),
        ({"model": "rwkv"}, UnsupportedModel, "'rwkv'"),
        ({"tokens": None}, CorruptModel, "no vocabulary"),
        ({"token_type": [1]}, CorruptModel, "token types"),
        ({"merges": ["x yz"]}, CorruptModel, "do not fit"),
        ({"merges": ["a b c"]}, CorruptModel, "do not fit"),
        ({"model": "llama"}, CorruptModel, "scores"),
    ],
)
def test_bad_metadata(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(byte_level(**fields))


def sentencepiece(**changes: Any) -> dict[str, Any]:
    plain = ["▁", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "▁hello", "lo", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *plain]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(plain))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(plain),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer._backend.id_to_token(number) for number in ids]


def test_sentencepiece() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    ids = tokenizer.encode("hello wé")
    assert names(tokenizer, ids) == ["<s>", "▁hello", "▁w", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello wé"
    assert tokenizer.decode(tokenizer.encode("  hello\n 中🎉")) == "  hello\n 中🎉"
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert names(bare, bare.encode("hello")) == ["hello"]


def test_the_best_score_merges_first() -> None:
    """ "hello": "he" then "ll" then "hell" -> "hello"; with "lo" best, "l" "lo" is taken first and "hell" never is."""
    fields = sentencepiece()
    fields["tokenizer.ggml.scores"][-2] = 5.0
    tokenizer = Tokenizer.from_gguf(fields)
    assert names(tokenizer, tokenizer.encode("hello"))[1:] == ["▁", "he", "l", "lo"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "<s>": 2, "</s>": 3}, merges=[]))
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path)
    return tmp_path


def configure(folder: Path, **config: Any) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    assert tokenizer.special_ids == {2, 3}
    assert tokenizer.encode("abababab") == [2, 0, 1, 0, 1, 0, 1, 0, 1]
    assert tokenizer.encode("ab</s>", special=False) == [0, 1, 3]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"add_bos_token": False}, [0]),
        ({"add_bos_token": True}, [2, 0]),
        ({"add_eos_token": True}, [2, 0, 3]),
        ({"add_bos_token": False, "add_eos_token": True}, [0, 3]),
        ({"add_bos_token": None}, [2, 0]),
    ],
)
def test_folder_bos_and_eos(folder: Path, config: dict[str, Any], ids: list[int]) -> None:
    configure(folder, **config)
    assert Tokenizer.from_folder(folder).encode("a") == ids


def test_folder_added_tokens_and_special_map(folder: Path) -> None:
    listed = {
        "5": {"content": "<y>"},
        "4": {"content": "<x>", "special": True},
        "2": {"content": "<s>", "special": True},
    }
    configure(folder, added_tokens_decoder=listed)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<x>", "eos_token": "old"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.vocabulary["<x>"], tokenizer.vocabulary["<y>"]) == (4, 5)
    assert tokenizer.special_ids == {2, 3, 4}
    assert (tokenizer.special_tokens["pad_token"], tokenizer.special_tokens["eos_token"]) == ("<x>", "</s>")


def test_folder_damaged(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_templates_are_read_from_three_places(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).chat_template is None
    configure(folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert Tokenizer.from_folder(folder).chat_template == "D"
    configure(folder, chat_template="S")
    assert Tokenizer.from_folder(folder).chat_template == "S"
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(folder).chat_template == "J"


def chat(template: str | None, messages: Any = None, **extra: Any) -> str:
    tokenizer = Tokenizer(Backend(models.BPE()), {"bos_token": "<s>"}, template)
    return tokenizer.apply_chat_template(messages or [{"role": "user", "content": "<é&>"}], **extra)


def test_templates() -> None:
    assert chat("{{ bos_token }}{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n") == "<s>  <é&>\n"
    assert chat("{% if add_generation_prompt %}G{% endif %}", add_generation_prompt=False) == ""
    assert chat("{{ messages | tojson }}") == '[{"role": "user", "content": "<é&>"}]'
    assert chat("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert chat("{{ tools is none }} {{ mood }}", mood="calm") == "True calm"
    assert chat("{% generation %}kept{% endgeneration %}{{ strftime_now('%%') }}") == "kept%"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages[9].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        None,
    ],
)
def test_templates_that_refuse(template: str | None) -> None:
    with pytest.raises(InvalidPrompt):
        chat(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("Hi", "list"),
        ({"role": "user", "content": "Hi"}, "list"),
        (["Hi"], "message 0 must be an object, got str"),
        ([{"role": "user"}], "lacks 'content'"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "message 1 has role 3"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only parts of type text"),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    tokenizer = Tokenizer(Backend(models.BPE()), {}, "x")
    with pytest.raises(InvalidPrompt, match=message):
        tokenizer.apply_chat_template(messages)


def test_invalid_text_and_token_ids_are_refused() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    with pytest.raises(InvalidPrompt, match="Unicode"):
        tokenizer.encode("\ud800")
    with pytest.raises(InvalidPrompt, match="token ids"):
        tokenizer.decode([-1])


def with_token(fields: dict[str, Any], token: str, kind: int) -> dict[str, Any]:
    more = (("tokens", token), ("scores", -1000.0), ("token_type", kind))
    return fields | {f"tokenizer.ggml.{key}": [*fields[f"tokenizer.ggml.{key}"], value] for key, value in more}


def test_phi3_swallows_the_space_after_its_tokens() -> None:
    fields = with_token(sentencepiece(), "<|end|>", 3)
    plain, phi3 = (Tokenizer.from_gguf(fields, strips_spaces=strips) for strips in (False, True))
    assert phi3.encode("<|end|> \n hello", special=False) == phi3.encode("<|end|>hello", special=False)
    assert phi3.encode("<s> hello", special=False) == plain.encode("<s> hello", special=False)
    assert plain.encode("<|end|>\nhello", special=False) != plain.encode("<|end|>hello", special=False)


def test_user_defined_runs_of_spaces_merge_first() -> None:
    """These are Gemma's. They come before any other merge, and also represent "▁▁" in the text."""
    fields = with_token(sentencepiece(add_space_prefix=False), "  ", 4)
    tokenizer = Tokenizer.from_gguf(fields)
    spaces, hello = len(fields["tokenizer.ggml.tokens"]) - 1, tokenizer.vocabulary["hello"]
    for text in ("  hello", "▁▁hello"):
        assert tokenizer.encode(text, special=False) == [spaces, hello]
    assert tokenizer.decode([spaces, hello]) == "  hello"


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_tokens_begin_somewhere_in_the_text(kind: str) -> None:
    words = vocabularies.tokenizer(kind)
    for text in filter(None, AWKWARD):
        starts = words.starts(text)
        assert len(starts) == len(words.encode(text))
        assert starts == sorted(starts)
        assert starts[:1] in ([0], [])
        assert starts[-1:] <= [len(text)]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tokens_begin_where_their_text_does(kind: str) -> None:
    words = vocabularies.framed(vocabularies.tokenizer(kind))
    text = "so it</s> is<s>, they say"
    first, *others = zip(words.encode(text), pairwise([*words.starts(text), len(text)]), strict=True)
    assert first == (words.bos_token_id, (0, 0))
    assert "".join(text[start:end] for _, (start, end) in others) == text
    special = [text[start:end] for token, (start, end) in others if token in words.special_ids]
    assert special == ["</s>", "<s>"]


def test_named_templates_come_from_files_and_config(folder: Path) -> None:
    configure(folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    found = Tokenizer.from_folder(folder)
    assert (found.chat_template, found.named_templates) == ("D", {"tool_use": "T"})
    assert [found.template_for(tools) for tools in (True, False)] == ["T", "D"]
    messages = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(messages, tools=[{"name": "f"}]) == "T"
    assert found.apply_chat_template(messages, tools=None) == found.apply_chat_template(messages) == "D"
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("R")
    (more / "tool_use.jinja").write_text("U")
    assert Tokenizer.from_folder(folder).named_templates == {"tool_use": "U", "rag": "R"}


def test_another_template_can_be_given(folder: Path, tmp_path: Path) -> None:
    configure(folder, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    own = Tokenizer.from_folder(folder)
    file = tmp_path / "mine.jinja"
    file.write_text("F{{ x }}")
    for given, shown in (("tool_use", "T"), ("default", "D"), (file, "F"), (str(file), "F"), ("I{{ x }}", "I")):
        other = own.with_template(given)
        for tools in (None, [{"name": "f"}]):
            assert other.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools) == shown
        assert other.encode("a b") == own.encode("a b")
    assert other.digest != own.digest
    with pytest.raises(InvalidOption, match=r"neither a file nor a template.*default|tool_use, default"):
        own.with_template("chatml")
