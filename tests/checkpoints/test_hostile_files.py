"""Model files that are made to hang, crash or exhaust the reader: each quickly gives an error of one line."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from typer.testing import CliRunner

from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.checkpoints.loader import native_config
from paceline.checkpoints.lora import MergeRules, open_model
from paceline.cli import app
from paceline.errors import CorruptModel, PacelineError, UnsupportedModel, one_line
from paceline.files.locate import resolve
from paceline.files.reading import read_json
from paceline.files.schema import IDENTITY
from tests.support.counted_lines import counted
from tests.support.cover import some
from tests.support.gguf_writing import write_gguf
from tests.support.random_heads import COMPACT, EAGLE3, head_of
from tests.support.tiny_families import SIZES

DEEP = '{"a":' * 200_000 + "1" + "}" * 200_000
DEEP_LIST = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
HUGE = 10**400
MOST_BYTES = 256 << 20


@pytest.fixture
def uncounted() -> None:
    """Disable the line limit for a file with millions of values."""


@pytest.fixture(autouse=True)
def _bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that every case runs few lines and makes no large allocation.

    A failing case hits the limit instead of using all memory of the machine.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + (4 << 30), hard))
    with nullcontext(lambda: 0) if "uncounted" in request.fixturenames else counted() as lines:
        yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert lines() < 50_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder without weights of layers. Errors must be found before the weights are read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SIZES))
    Backend(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    return tmp_path


def refused(act: Callable[[], object]) -> PacelineError:
    """Return the error. Check that it is one printable line of reasonable length with a fix."""
    with pytest.raises(PacelineError) as caught:
        act()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2500
    assert caught.value.fix
    return caught.value


def judged(path: Path) -> object:
    """Judge a model reference as `paceline info` does."""
    checkpoint = open_checkpoint(resolve(path))
    config = native_config(checkpoint)
    eos_token_ids(checkpoint.config, checkpoint.generation, checkpoint.tokenizer)
    return config


def configured(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | SIZES | changes))


FIELDS: list[tuple[str, str, list[Any]]] = [
    ("llama", "num_hidden_layers", [2**63, 4 * 10**9, HUGE, 0, -1, None, 2.0, "4", True, [4], {}]),
    ("llama", "rms_norm_eps", [None, "8", [8], HUGE, -1e-6, float("nan"), float("inf"), True]),
    ("llama", "hidden_act", [3, None, ["silu"], {}, False]),
    ("mistral", "sliding_window", ["8", {}, float("nan"), float("inf"), 2**63, 2.5, True, -1]),
    ("qwen3", "sliding_window", ["8", {}, float("nan"), 2**63]),
    ("gemma3_text", "sliding_window", ["8", [], float("inf"), 2**63]),
    ("llama", "vocab_size", [2**31, None, "9"]),
    ("llama", "rope_theta", [0, -1, "x", float("nan"), None]),
    ("llama", "rope_scaling", ["linear", 3, [], {"rope_type": []}, {"rope_type": "linear", "factor": "2"}]),
    ("llama", "rope_parameters", [{"rope_type": "linear", "factor": float("nan")}, {"rope_type": "yarn", "factor": 0}]),
    ("gemma3_text", "rope_parameters", [{"full_attention": 3}, {"sliding_attention": [1]}]),
    ("qwen3", "layer_types", ["full_attention", [[]], 4, [None] * 4]),
    ("qwen3", "max_window_layers", ["1", -1, None]),
    ("smollm3", "no_rope_layers", [4, ["a"] * 4, {"0": 1}]),
    ("smollm3", "no_rope_layer_interval", [0, "4", None]),
    ("qwen3_moe", "num_experts", [2**40, "8", None]),
    ("mixtral", "num_local_experts", [10**9, 0]),
    ("gemma2", "query_pre_attn_scalar", [0, None, "24", -1]),
    ("gemma2", "final_logit_softcapping", [0, "30", []]),
    ("llama", "eos_token_id", [-1, [3, -1], "2", True, 2.0, {}, [[1]]]),
    ("llama", "model_type", [["llama"], {}, 3, None]),
    ("llama", "architectures", [3, "LlamaForCausalLM", [1], {}]),
    ("llama", "tie_word_embeddings", ["yes", 1]),
]


@pytest.mark.parametrize(
    ("family", "field", "value"), [(family, field, value) for family, field, values in FIELDS for value in values]
)
def test_a_config_field_of_the_wrong_kind_or_range_is_named(
    folder: Path, family: str, field: str, value: object
) -> None:
    configured(folder, **{"model_type": family, field: value})
    error = refused(lambda: judged(folder))
    assert isinstance(error, CorruptModel)
    assert ("rope scaling" if field.startswith("rope_") and isinstance(value, dict) else field) in error.cause
    assert "must be" in error.cause or "supported" in error.cause


def test_heads_that_no_matrix_can_hold(folder: Path) -> None:
    """The kernels count a matrix's rows in 32 bits."""
    configured(folder, num_attention_heads=2**12, num_key_value_heads=2**12, head_dim=2**20)
    assert "4096 heads of size 1048576 exceed" in refused(lambda: judged(folder)).cause


JSON_FILES = [
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("model.safetensors.index.json", "tokenizer.json"),
]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", [DEEP, DEEP_LIST], ids=["objects", "lists"])
def test_json_nested_200000_deep(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert name in refused(lambda: judged(folder)).cause


@pytest.mark.usefixtures("uncounted")
@some("part", ["[],", "{},", '"",'], fast=["[],"])
def test_json_of_millions_of_empty_values(folder: Path, part: str) -> None:
    (folder / "config.json").write_text('{"a":[' + part * ((7 << 20) // len(part)) + "0]}")
    assert "lacks" in refused(lambda: judged(folder)).cause


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text('{"model_type": ["llama"]}'),
        lambda path: path.write_text('{"architectures": 3}'),
        lambda path: path.write_text(DEEP),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ],
)
def test_the_command_line_prints_one_line(folder: Path, change: Callable[[Path], object]) -> None:
    change(folder / "config.json")
    result = CliRunner().invoke(app, ["info", str(folder)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["n_layer", "num_layers"])
def test_a_model_that_transformers_would_run_has_a_bounded_number_of_layers(folder: Path, name: str) -> None:
    configured(folder, model_type="gpt2", **{name: 4 * 10**9})
    assert f"{name} must be" in refused(lambda: judged(folder)).cause


@pytest.mark.parametrize("depth", [70, 900])
def test_json_that_is_deep_but_not_too_deep_for_python(folder: Path, depth: int) -> None:
    (folder / "config.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
    assert "deeper than 64" in refused(lambda: judged(folder)).cause


@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja"])
def test_a_pipe_a_device_and_a_folder_are_not_read(folder: Path, name: str) -> None:
    path = folder / name
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.mkdir()):
        path.unlink(missing_ok=True)
        make(path)
        assert name in refused(lambda: judged(folder)).cause


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_reference_that_is_a_pipe_or_a_device(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refused(lambda: resolve(tmp_path / name)).cause
    assert "not a regular file" in refused(lambda: open_checkpoint(resolve(Path("/dev/zero")))).cause


@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja"])
def test_a_file_that_is_too_large_is_not_read_to_its_end(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk
    error = refused(lambda: judged(folder))
    assert isinstance(error, UnsupportedModel)
    assert "MiB" in error.cause


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_that_is_not_utf8_or_not_an_object(folder: Path, name: str) -> None:
    for data in (b"\xff\xfe{", b"[1]", b"nul", b'{"a":' + b"9" * 5000 + b"}"):
        (folder / name).write_bytes(data)
        assert name in refused(lambda: judged(folder)).cause


def test_links_to_regular_files_are_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The hub's cache contains such links."""
    blob = tmp_path_factory.mktemp("blobs") / "c0ffee"
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to(blob)
    assert read_json(folder / "config.json", IDENTITY)["model_type"] == "llama"


@pytest.mark.parametrize(
    "where",
    [
        ["a"],
        {"a": []},
        {"a": None},
        {"a": "x" * 5000},
        {"a": "one\ntwo"},
        {"a": "\ud800.safetensors"},
        {"a": "nul\0.safetensors"},
        {"a": "../x.safetensors"},
        {"a": ".."},
        {"a": ""},
        {"a\n" * 5000: "model.safetensors"},
        3,
    ],
    ids=lambda where: repr(where)[:20],
)
def test_an_index_that_names_no_file(folder: Path, where: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert isinstance(refused(lambda: judged(folder)), CorruptModel)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": ["a"]},
        {"added_tokens_decoder": {"x": {"content": "z"}}},
        {"added_tokens_decoder": {"7": "z"}},
        {"added_tokens_decoder": {"7": {"content": "\ud800"}}},
        {"added_tokens_decoder": {"7": {"content": "z", "lstrip": "yes"}}},
        {"chat_template": [3]},
        {"chat_template": {"default": 3}},
        {"bos_token": 3},
        {"bos_token": {"content": 3}},
        {"add_bos_token": "yes"},
    ],
)
def test_a_tokenizer_config_of_the_wrong_kind(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "tokenizer_config.json" in refused(lambda: judged(folder)).cause


@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_token_id", -1), ("temperature", "hot"), ("top_k", 1.5), ("top_p", 2), ("do_sample", "yes")],
)
def test_a_generation_config_of_the_wrong_kind(folder: Path, field: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    assert field in refused(lambda: judged(folder)).cause


# --- Adapters and heads


@pytest.mark.parametrize("text", [DEEP, '{"peft_type": "LORA", "r": 1e3, "lora_alpha": 1}', "[]"])
def test_an_adapter_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    for act in (lambda: MergeRules(tmp_path), lambda: open_model(tmp_path)):
        assert "adapter_config.json" in refused(act).cause


@pytest.mark.parametrize("pattern", ["(.*.*)*x", "(a|a)+b", "a?" * 30 + "a" * 30, "(a|a)" * 30, "((?=a))", "a" * 9999])
def test_an_adapters_pattern_that_could_match_for_ever(tmp_path: Path, pattern: str) -> None:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": {pattern: 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "very long to match" in refused(lambda: MergeRules(tmp_path)).cause


def test_an_adapters_usual_patterns_are_read(tmp_path: Path) -> None:
    patterns = {"q_proj": 2, r"model\.layers\.[0-9]+\.self_attn\.(?:q|k)_proj": 4, r"^model\.layers\.\d+\..*o_proj": 8}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    rules = MergeRules(tmp_path)
    names = ("x.q_proj", "model.layers.12.self_attn.k_proj", "model.layers.3.self_attn.o_proj", "x.my_proj")
    assert [rules.rank_of(name) for name in names] == [2, 4, 8, 1]


@pytest.mark.parametrize(
    "keys",
    [
        {"draft_vocab_size": 2**40},
        {"architectures": 3},
        {"paceline": [1]},
        {"eagle_config": "x"},
        {"eagle_aux_hidden_state_layer_ids": [2**63]},
        {"transformer_layer_config": {"model_type": ["llama"]}},
        {"speculators_model_type": ["eagle3"]},
        {"speculators_config": {"verifier": 3}},
        {"speculators_config": {"verifier": {"name_or_path": 3}}},
    ],
)
def test_a_heads_config_of_the_wrong_kind(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = write_head(tmp_path / "head", head_of(EAGLE3))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    assert isinstance(refused(lambda: open_head(folder)), CorruptModel)
    (folder / "config.json").write_text(DEEP)
    assert "deeper" in refused(lambda: open_head(folder)).cause


@pytest.mark.parametrize("name", ["medusa_heads.9999999999.layers.0.weight", "medusa_heads.0.layers.9999999999.weight"])
def test_a_medusa_head_that_numbers_its_blocks_wildly(tmp_path: Path, name: str) -> None:
    folder = write_head(tmp_path / "head", head_of(COMPACT))
    save_file({name.replace("medusa_heads", "blocks"): torch.ones(32, 32)}, folder / "model.safetensors")
    assert "lacks blocks" in refused(lambda: open_head(folder)).cause


# --- GGUF

ARCHITECTURES = ["llama", "smollm3", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3"]


def gguf_judged(path: Path) -> object:
    checkpoint = open_checkpoint(path)
    return native_config(checkpoint), dict(checkpoint.tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layers", [4_000_000_000, 4097, 0])
def test_a_gguf_of_absurdly_many_layers(tmp_path: Path, architecture: str, layers: int) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, layers=layers)
    assert f"{architecture}.block_count" in refused(lambda: gguf_judged(tmp_path / "m.gguf")).cause


@pytest.mark.parametrize(
    "fields",
    [
        {"split.count": "abc"},
        {"split.count": -1},
        {"general.type": 3},
        {"llama.rope.freq_base": "x"},
        {"llama.rope.scaling.type": 3},
        {"llama.rope.scaling.factor": float("nan")},
        {"llama.attention.key_length": "x"},
        {"llama.attention.sliding_window": "x"},
        {"llama.expert_count": 2**31 - 1},
        {"llama.rope.dimension_count": [16]},
        {"tokenizer.ggml.eot_token_id": "x"},
        {"tokenizer.ggml.eot_token_id": -1},
        {"tokenizer.ggml.unknown_token_id": -1},
        {"tokenizer.ggml.add_bos_token": "x"},
        {"tokenizer.chat_template": 3},
    ],
    ids=str,
)
def test_gguf_metadata_of_the_wrong_kind(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_gguf(tmp_path / "m.gguf", fields=fields)
    error = refused(lambda: gguf_judged(tmp_path / "m.gguf"))
    assert isinstance(error, CorruptModel)
    assert f"{next(iter(fields))} must be" in error.cause


def test_a_gguf_vocabulary_with_an_endless_token(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokens=["a", "b", "a" * 2_000_000, "<s>", "</s>"])
    assert "2000000 characters" in refused(lambda: gguf_judged(tmp_path / "m.gguf")).cause


def test_a_gguf_array_of_empty_strings_in_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = gguf.GGUF_MAGIC.to_bytes(4, "little") + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    key = b"tokenizer.ggml.tokens"
    kinds = bytes([9, 0, 0, 0, 8, 0, 0, 0])  # an array of strings
    path.write_bytes(head + len(key).to_bytes(8, "little") + key + kinds + (1 << 36).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    assert "68719476736 elements" in refused(lambda: gguf_judged(path)).cause


def gguf_of(*fields: tuple[bytes, int, bytes], tensors: int = 0) -> bytes:
    """Return a header with fields, each with a key, the number of a type, and a value."""
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields))
    return head + b"".join(struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + x for key, kind, x in fields)


NUMBERS = struct.pack("<IQ", 0, 1 << 22) + bytes(1 << 22)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (gguf_of(*((b"%d" % i, 9, NUMBERS) for i in range(4))), "12582912 elements"),
        (gguf_of((b"a", 8, struct.pack("<Q", 1 << 29)) * 1), "runs past the end"),
        (gguf_of((b"a", 9, struct.pack("<IQ", 9, 1))), "type 9"),
        (gguf_of((b"a", 99, b"")), "type 99"),
        (gguf_of((b"a", 0, b"1"), (b"a", 0, b"1")), "a occurs twice"),
        (gguf_of((b"\xff", 0, b"1")), "utf-8"),
        (gguf_of((b"general.alignment", 4, struct.pack("<I", 24))), "alignment of 24"),
        (gguf_of((b"general.alignment", 8, struct.pack("<Q", 2) + b"32")), "alignment of 32"),
        (gguf_of(tensors=1) + struct.pack("<QI", 0, 4_000_000_000), "4000000000 dimensions"),
        (gguf_of(tensors=1) + struct.pack("<QIQIQ", 0, 1, 1 << 63, 0, 0), "runs past the end"),
        (gguf_of(tensors=1) + struct.pack("<QIQIQ", 0, 1, 8, 0, (1 << 64) - 1), "runs past the end"),
        (gguf_of(tensors=1) + struct.pack("<QIQIQ", 0, 1, 33, 2, 0), "33 elements in blocks of 32"),
        (gguf_of(tensors=1) + struct.pack("<QIQIQ", 0, 1, 0, 0, 0), "is empty"),
        (gguf_of(tensors=1 << 62), " twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_header_that_is_wrong(tmp_path: Path, data: bytes, cause: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    assert cause in refused(lambda: gguf_judged(path)).cause


def test_a_gguf_that_stacks_absurdly_many_experts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tensors={"blk.0.ffn_gate_exps.weight": (5000, 1, 32)})
    assert "5000 experts" in refused(lambda: gguf_judged(tmp_path / "m.gguf")).cause


def test_errors_are_one_printable_line() -> None:
    error = CorruptModel("a\nb\0c\ud800" + "x" * 9000, "fix\r\nit")
    assert error.cause.startswith("a b\\x00c\\ud800xxx")
    assert len(error.cause) < 1100
    assert error.fix == "fix  it"
    assert str(error).isprintable()
    assert one_line("plain é 漢") == "plain é 漢"
